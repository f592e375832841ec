"""Objects under one root, on any file system that fsspec reaches.

An object is absent, or whole and durable: never half-written, whatever happens to the writer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import fsspec
import tenacity
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

NO_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}  # making one could make a bucket instead
DELETERS = 8
S3_CONFIG = {
    "retries": {"total_max_attempts": 1},  # or they multiply with ours
    # Some servers answer a range with the checksum of the whole object; checkpoints have hashes of their own.
    "response_checksum_validation": "when_required",
}
FULL = (errno.ENOSPC, errno.EDQUOT)
# s3fs maps SlowDown to EBUSY and InternalError to EREMOTEIO.
TRANSIENT_ERRNO = {
    getattr(errno, name, None)
    for name in ("EAGAIN", "EBUSY", "EINTR", "EREMOTEIO", "ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH", "ENETDOWN")
} - {None}
# Of libraries that may not be installed, by the name of the class or of one of its bases.
TRANSIENT_CLASS = {
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
    "ConnectionError",  # botocore, requests
    "HTTPClientError",  # botocore
    "IncompleteRead",  # urllib3
    "IncompleteReadError",  # asyncio, azure
    "ResponseParserError",  # botocore: an answer that was cut off
    "ServiceRequestError",  # azure
    "ServiceResponseError",
    "TimeoutError",
    "TransportError",  # google.auth
}
STATUS_ATTRIBUTES = ("status_code", "status", "code")  # azure, aiohttp, gcsfs
UNKNOWN_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}
_memory_lock = threading.Lock()  # memory:// looks and then writes


class StoreError(Exception):
    """The store refused or did not answer.

    Args:
        message: names the object and what is wrong; the cause is the file system's own error.
        hint: what to do about it; may be empty.
    """

    code = "store_unreachable"
    exit_code = 3

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.hint = hint


class Store:
    """May be used from several threads.

    Args:
        url: a folder on local disk or an fsspec URL, such as ``s3://bucket/run``.
        options: passed to the file system; see its documentation.
        patience_s: how long throttling, timeouts and broken connections are met with another try.

    Raises:
        StoreError: unknown protocol, or a file system package that is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, patience_s: float = 30.0) -> None:
        # A cached listing hides objects that are there.
        settings = {"use_listings_cache": False, **(options or {})}
        if url.startswith(("s3://", "s3a://")):
            settings.setdefault("config_kwargs", S3_CONFIG)
        self.url = url
        self._patience_s = patience_s
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **settings)
        except (ImportError, ValueError, OSError) as error:
            raise StoreError(f"{url}: {error}") from error
        self._local = isinstance(self._fs, LocalFileSystem)
        protocol = self._fs.protocol
        self._has_folders = not NO_FOLDERS & {protocol, *(() if isinstance(protocol, str) else protocol)}
        self._probe_lock = threading.Lock()
        self._conditional: bool | None = True if self._local or isinstance(self._fs, MemoryFileSystem) else None

    @property
    def conditional(self) -> bool:
        """Whether `create` is safe against others that create the same object at the same moment.

        Raises:
            StoreError: the store does not answer, or cannot be written to.
        """
        with self._probe_lock:
            if self._conditional is None:
                name = f"conditional-{secrets.token_hex(8)}"
                self._conditional = self._try("written", name, lambda: self._probe(self._path(name)))
                self.delete(name)
            return self._conditional

    def write(self, name: str, *chunks: Buffer) -> None:
        """Writes a whole object, the chunks one after the other, replacing one of that name.

        Raises:
            StoreError: nothing was written, or it is unknown whether.
        """
        path = self._path(name)
        if self._local:
            self._try("written", name, lambda: _write_file(path, chunks, exclusive=False))
            return
        data = _joined(chunks)
        self._try("written", name, lambda: self._put(path, data))

    def create(self, name: str, data: bytes) -> bool:
        """Writes an object unless there is one of that name.

        Returns:
            ``True``: what is there now is this data, ``False``: something else is. Equal data counts as ours, since
            the answer to a write that succeeded may get lost; callers that race put something unique in it.

        Raises:
            StoreError: it is unknown whether it was written.
        """
        path = self._path(name)
        conditional = self.conditional

        def attempt() -> None:
            if self._local:
                _write_file(path, (data,), exclusive=True)
            elif isinstance(self._fs, MemoryFileSystem):
                with _memory_lock:
                    self._fs.pipe_file(path, data, mode="create")
            elif conditional:
                with _found_as_exists():
                    self._put(path, data, mode="create")
            elif not self._fs.exists(path):  # the best that can be done
                self._put(path, data)

        try:
            self._try("written", name, attempt, FileExistsError)
            if conditional:
                return True
        except FileExistsError:
            pass
        there = self.read(name)
        if there is None:
            raise StoreError(f"{self.url}/{name} cannot be written: something else is in its place")
        return there == data

    def read(self, name: str) -> bytes | None:
        """The object's bytes, or ``None`` when there is none.

        Raises:
            StoreError: the store did not answer.
        """
        return self._read(name)

    def read_range(self, name: str, start: int, stop: int) -> bytes | None:
        """Bytes ``start`` to ``stop`` of an object, fewer where it ends before, or ``None`` when there is none.

        Raises:
            StoreError: the store did not answer.
        """
        return self._read(name, start=start, end=stop) if stop > start else b""

    def list(self, prefix: str) -> list[str]:
        """The names of all objects below ``prefix/``, sorted; there may be none. An empty prefix is the root.

        Raises:
            StoreError: the store did not answer.
        """
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of all objects below ``prefix/``, by name.

        Raises:
            StoreError: the store did not answer.
        """
        path = self._path(prefix) if prefix else self._root
        try:
            if self._local:
                found = self._try("listed", prefix, lambda: dict(_files(path)), FileNotFoundError)
            else:
                infos = self._try("listed", prefix, lambda: self._fs.find(path, detail=True), FileNotFoundError)
                found = {name: int(info["size"]) for name, info in infos.items() if info["type"] == "file"}
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        return {name[start:]: size for name, size in found.items() if name.startswith(f"{path}/") and name[-1] != "/"}

    def delete(self, name: str) -> None:
        """Deletes an object; an absent one is no error.

        Raises:
            StoreError: the store did not answer.
        """
        path = self._path(name)

        def attempt() -> None:
            self._fs.rm_file(path)
            if self._local:
                _sync_folder(os.path.dirname(path))

        try:
            self._try("deleted", name, attempt, FileNotFoundError)
        except FileNotFoundError:
            return

    def delete_tree(self, prefix: str) -> None:
        """Deletes all objects below ``prefix/``; there may be none.

        Raises:
            StoreError: the store did not answer; some may be deleted.
        """
        if self._local:
            # What unfinished writes left behind goes too.
            try:
                self._try("deleted", prefix, lambda: shutil.rmtree(self._path(prefix)), FileNotFoundError)
            except FileNotFoundError:
                return
        else:
            with ThreadPoolExecutor(DELETERS) as pool:
                for _ in pool.map(self.delete, self.list(prefix)):
                    pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        if self._has_folders:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, data, mode=mode)

    def _probe(self, path: str) -> bool:
        try:
            try:
                with _found_as_exists():
                    self._put(path, b"first", mode="create")
            except FileExistsError:
                pass  # an earlier try whose answer was lost
            with _found_as_exists():
                self._put(path, b"second", mode="create")
        except FileExistsError:
            return True
        except NotImplementedError:
            return False
        except OSError as error:
            if error.errno != errno.ENOSYS:  # how s3fs says 501
                raise
        return False

    def _read(self, name: str, **limits: int) -> bytes | None:
        try:
            return bytes(
                self._try("read", name, lambda: self._fs.cat_file(self._path(name), **limits), FileNotFoundError)
            )
        except FileNotFoundError:
            return None
        except StoreError as error:
            if limits and _status(error.__cause__) == 416:  # the object ends before the range begins
                return b""
            raise

    def _try(self, done: str, name: str, function: Callable[[], T], expected: type[OSError] | None = None) -> T:
        """Calls until it succeeds or is no use.

        Raises:
            StoreError: for any error but the ``expected``, which is raised as it is.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_transient),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
            stop=tenacity.stop_after_delay(self._patience_s),
            reraise=True,
        )
        try:
            return retrying(function)
        except Exception as error:  # every file system has errors of its own
            # A bucket that is not there looks like an object that is not there.
            if expected and isinstance(error, expected) and "NoSuchBucket" not in _codes(error):
                raise
            why = str(error) or type(error).__name__
            raise StoreError(f"{self.url}/{name} cannot be {done}: {why}", _advice(error)) from error


@contextlib.contextmanager
def _found_as_exists() -> Iterator[None]:
    """A refused condition as ``FileExistsError``, also from stores that do not name the condition."""
    try:
        yield
    except OSError as error:
        if "PreconditionFailed" not in _codes(error):
            raise
        raise FileExistsError(str(error)) from error


def _joined(chunks: tuple[Buffer, ...]) -> bytes:
    return chunks[0] if len(chunks) == 1 and isinstance(chunks[0], bytes) else b"".join(chunks)


def _write_file(path: str, chunks: tuple[Buffer, ...], *, exclusive: bool) -> None:
    folder, _, name = path.rpartition("/")
    _make_folder(folder)
    temporary = f"{folder}/.{name}.{secrets.token_hex(8)}"  # names with a dot are not listed
    try:
        with open(temporary, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync_folder(folder)


def _make_folder(folder: str) -> None:
    if not os.path.isdir(folder):
        parent = os.path.dirname(folder)
        _make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        _sync_folder(parent)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: str) -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # deleted since
                if entry.is_dir():
                    yield from _files(f"{folder}/{entry.name}")
                elif not entry.name.startswith("."):
                    yield f"{folder}/{entry.name}", entry.stat().st_size


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _codes(error: BaseException | None) -> set[str]:
    """What S3 calls the error."""
    responses = [getattr(cause, "response", None) for cause in _causes(error)]
    return {str(found.get("Error", {}).get("Code")) for found in responses if isinstance(found, dict)}


def _status(error: BaseException | None) -> int | None:
    """Of the HTTP answer, if that is what went wrong."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        facts = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        for status in (facts.get("HTTPStatusCode"), *(getattr(cause, key, None) for key in STATUS_ATTRIBUTES)):
            if isinstance(status, int):
                return status
    return None


def _named(error: BaseException, names: set[str]) -> bool:
    return any(cls.__name__ in names for cause in _causes(error) for cls in type(cause).__mro__)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        return False
    status = _status(error)
    if status is not None:
        return status in (408, 409, 429) or (status >= 500 and status != 501)
    if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNO:
        return True
    return _named(error, TRANSIENT_CLASS)


def _advice(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in FULL:
        return "free some space there"
    if "NoSuchBucket" in _codes(error):
        return "create the bucket, or correct the URL"
    if (
        isinstance(error, PermissionError)
        or number == errno.EROFS
        or _status(error) in (401, 403)
        or _named(error, UNKNOWN_CREDENTIALS)
    ):
        return "check the credentials and what they permit"
    if _is_transient(error):
        return "check that the store can be reached from here, and try again"
    return ""
