"""One watch stream of etcd on the raw stub; etcd3's own watcher loses events when it reconnects."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc

from elastic.errors import EtcdUnreachable
from elastic.rendezvous.connections import Connections, probe
from elastic.rendezvous.shim import load_etcd3


class WatchStream:
    """Iterates over etcd's `WatchResponse` messages until the stream breaks, which raises `EtcdUnreachable`.

    One thread iterates; any thread may call the methods.
    """

    def __init__(self, connections: Connections, prefix: str, request: Any) -> None:
        self._connections = connections
        self._operation = f"watch {prefix}"
        self._exit = ExitStack()
        self._closing = threading.Lock()
        try:
            self._connection = self._exit.enter_context(connections.borrow())
        except grpc.RpcError as e:
            raise connections.map_error(self._operation, e) from e
        client = self._connection.client
        # etcd ends the watch when the requests end, so they must not: grpc waits at this queue until `close`.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(request)
        try:
            stub = load_etcd3().etcdrpc.WatchStub(client.channel)
            self._call = stub.Watch(iter(self._requests.get, None), metadata=client.metadata)
        except ValueError as e:
            self._exit.close()
            raise EtcdUnreachable(f"{self._operation}: the etcd client was closed", "make a new one") from e

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._call
        except grpc.RpcError as e:
            raise self._connections.map_error(self._operation, e) from e
        raise EtcdUnreachable(f"{self._operation}: etcd ended the stream", "it is opened again")

    def probe(self, timeout_s: float) -> None:
        """A read over this stream's own connection: a stopped or cut-off member leaves a stream silent, not broken.

        Raises:
            EtcdUnreachable: no answer in time.
        """
        try:
            probe(self._connection.client, timeout=timeout_s, metadata=self._connection.client.metadata)
        except grpc.RpcError as e:
            raise self._connections.map_error(self._operation, e) from e
        except ValueError as e:
            raise EtcdUnreachable(f"{self._operation}: the etcd client was closed", "make a new one") from e

    def abandon(self) -> None:
        """Closes, and has everybody else use the next endpoint."""
        self._connections.retire(self._connection)
        self.close()

    def close(self) -> None:
        """Ends the iteration; closing twice is no error."""
        self._requests.put(None)
        self._call.cancel()
        with self._closing:  # the two threads of a watch may both come here
            self._exit.close()
