"""Objects under one root, on any file system that fsspec reaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fsspec


class StoreError(Exception):
    """The store refused or did not answer; the message names the object, the cause is the file system's own error."""


class Store:
    """
    Args:
        url: a folder on local disk or an fsspec URL, such as ``s3://bucket/run``.
        options: passed to the file system; see its documentation.

    Raises:
        StoreError: unknown protocol, or a file system package that is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        # A cached listing hides objects that are there.
        settings = {"use_listings_cache": False, **(options or {})}
        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **settings)
        except (ImportError, ValueError, OSError) as error:
            raise StoreError(f"{url}: {error}") from error

    def write(self, name: str, data: bytes) -> None:
        """Writes a whole object, replacing one of that name.

        Raises:
            StoreError: nothing was written, or it is unknown whether.
        """
        path = f"{self._root}/{name}"
        try:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, data)
        except Exception as error:  # every file system has errors of its own
            raise StoreError(f"{self.url}/{name} cannot be written: {error}") from error

    def read(self, name: str) -> bytes | None:
        """The object's bytes, or ``None`` when there is none.

        Raises:
            StoreError: the store did not answer.
        """
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise StoreError(f"{self.url}/{name} cannot be read: {error}") from error

    def delete(self, name: str) -> None:
        """Deletes an object; an absent one is no error.

        Raises:
            StoreError: the store did not answer.
        """
        try:
            self._fs.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return
        except Exception as error:
            raise StoreError(f"{self.url}/{name} cannot be deleted: {error}") from error
