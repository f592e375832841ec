"""A watch on a prefix that survives what a stream of etcd does not: restarts, reconnects, compaction, silence."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from elastic.errors import EtcdUnreachable
from elastic.rendezvous.client import Etcd
from elastic.rendezvous.stream import WatchStream
from elastic.rendezvous.values import KV, kv_from

CANARY_S = 1.0
"""A stream silent for this long is checked by a read, which has as long again to answer."""
MAX_PENDING = 10_000
"""Events not yet fetched; beyond it only the latest of each key is kept."""
_MAX_PAUSE_S = 1.0


@dataclass(frozen=True)
class Event:
    """A key was written or deleted; of a deleted one, only `kv.key` and `kv.mod_revision` mean anything."""

    kind: Literal["put", "delete"]
    kv: KV


class Watch:
    """Delivers what happens to the keys of a prefix from `start_revision` on, each event once, in order.

    A daemon thread follows etcd's stream and opens it again after the last revision seen. Where etcd has compacted
    that away, or has lost data, the prefix is listed and events are made up from the difference: then, of several
    changes to one key, only the last is seen. A second daemon thread reads over the stream's connection when nothing
    was heard, because a stopped etcd leaves a stream silent for ever.

    Close it before its client.

    Args:
        known: mod revisions of the keys just before `start_revision`, see `watch_prefix`; keys not named here
            count as new when the prefix has to be listed.
    """

    def __init__(self, etcd: Etcd, prefix: str, start_revision: int, known: Mapping[str, int] | None = None) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._next = start_revision
        self._known = dict(known or {})
        self._changed = threading.Condition()
        self._pending: list[Event] = []
        self._stream: WatchStream | None = None
        self._heard = False
        self._healthy = False
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"elastic-watch {prefix}", daemon=True)
            for target in (self._follow_until_closed, self._check_until_closed)
        ]
        for thread in self._threads:
            thread.start()

    def get(self, timeout_s: float) -> list[Event]:
        """What happened since the last call; waits up to `timeout_s` seconds for the first event. May be empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._error or self._closed.is_set(), timeout_s)
            if self._error is not None:
                raise self._error  # a fault in this module, never a failing etcd
            events, self._pending = self._pending, []
            return events

    @property
    def closed(self) -> bool:
        """Whether `close` was called: `get` waits for nothing any more."""
        return self._closed.is_set()

    @property
    def healthy(self) -> bool:
        """Whether etcd accepted the watch and has answered since; false does not mean that events were lost."""
        return self._healthy

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends both threads and a waiting `get`, within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closed.set()
            self._healthy = False
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.close()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # The following thread.

    def _follow_until_closed(self) -> None:
        pause_s = 0.05
        try:
            while not self._closed.is_set():
                try:
                    self._follow()
                    pause_s = 0.05
                except EtcdUnreachable:
                    self._healthy = False
                    # Not in step with everybody else who lost the same etcd.
                    self._closed.wait(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        except BaseException as e:  # noqa: BLE001 - a thread has nobody to raise to; `get` raises it
            with self._changed:
                self._error, self._healthy = e, False
                self._changed.notify_all()

    def _follow(self) -> None:
        """One stream, to its end; returns when the prefix was listed anew and another stream may follow at once."""
        stream = self._etcd.watch_stream(self._prefix, self._next)
        with self._changed:
            self._stream = stream
            if self._closed.is_set():
                stream.close()
                return
        try:
            for response in stream:
                self._heard = True
                if response.created and response.header.revision < self._next - 1:
                    break  # a member that lags, or data was lost: the list tells
                if response.canceled:
                    if not response.compact_revision:
                        raise EtcdUnreachable(f"watch {self._prefix}: {response.cancel_reason}", "it is opened again")
                    break
                self._healthy = not self._closed.is_set()
                self._deliver([self._event(message) for message in response.events])
        except EtcdUnreachable:
            if not self._closed.is_set():
                stream.abandon()
            raise
        finally:
            stream.close()
            with self._changed:
                self._stream = None
        self._list_again()

    def _event(self, message: Any) -> Event:
        return Event("delete" if message.type == message.DELETE else "put", kv_from(message.kv))

    def _list_again(self) -> None:
        kvs, revision = self._etcd.range(self._prefix)
        present = {kv.key for kv in kvs}
        events = [Event("delete", KV(key, b"", 0, revision, 0)) for key in sorted(self._known) if key not in present]
        events += [
            Event("put", kv)
            for kv in sorted(kvs, key=lambda kv: kv.mod_revision)
            if self._known.get(kv.key) != kv.mod_revision
        ]
        self._deliver(events)
        self._next = revision + 1

    def _deliver(self, events: list[Event]) -> None:
        # The header's revision may be ahead of events still to come, so only events move the start of the next stream.
        for event in events:
            self._next = event.kv.mod_revision + 1
            if event.kind == "put":
                self._known[event.kv.key] = event.kv.mod_revision
            else:
                self._known.pop(event.kv.key, None)
        if not events:
            return
        with self._changed:
            self._pending += events
            if len(self._pending) > MAX_PENDING:
                latest = {event.kv.key: event for event in self._pending}
                self._pending = sorted(latest.values(), key=lambda event: event.kv.mod_revision)
            self._changed.notify_all()

    # The checking thread.

    def _check_until_closed(self) -> None:
        while not self._closed.wait(CANARY_S):
            with self._changed:
                stream, heard, self._heard = self._stream, self._heard, False
            if stream is None or heard:
                continue
            try:
                stream.probe(CANARY_S)
            except EtcdUnreachable:
                self._healthy = False
                stream.abandon()  # the following thread sees it end


def watch_prefix(etcd: Etcd, prefix: str) -> tuple[list[KV], Watch]:
    """The keys of a prefix now, sorted, and a watch of everything after.

    Raises:
        EtcdUnreachable: the list could not be read.
    """
    kvs, revision = etcd.range(prefix)
    return kvs, Watch(etcd, prefix, revision + 1, {kv.key: kv.mod_revision for kv in kvs})
