"""A worker process: ``python -m elastic.engine.worker FD PARENT PAGE``, child of an agent, one per device. PAGE is the
descriptor of a page on which it says what it is doing, see ``page.py``.

From the agent, as JSON lines on the inherited socket FD:

    init {config, folder, boundaries, host, secret, checkpoint_url, generation, writer}     first, once
    form {node, …}      the record of a plan as it stands in etcd, with the name of this node
    freeze {epoch, timeout_s}    a newer epoch has begun: stop and report what is held
    stop                vote to stop after the step under way

To the agent:

    ready {pid, store, layers, fingerprint}   the job is loaded; asks to be planned in
    frozen {epoch, step, prepared, vote, holds, at}
    formed {epoch, form_s, transfer_s}
    voted {epoch, at}                         the first vote of the epoch has passed
    step {epoch, …}                           rank 0 only: one decided step
    end {epoch, kind, step, reason, loss, digests, ledger}
    error {epoch, step, error, at}            the user's code, or a refusal by name
    broken {epoch, reason, at}                a collective or a transfer failed
    unreadable {epoch, manifest, reason, at}  the checkpoint to start from is damaged
    saved {version, writer, part, layers, …}  this worker's part of a checkpoint is in the store
    unsaved {version, writer, reason}         it is not, and will not be
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from elastic.engine.channel import Channel, Message
from elastic.engine.page import Page
from elastic.errors import ElasticError, UserCodeError

if TYPE_CHECKING:
    from elastic.engine.session import Session

PR_SET_PDEATHSIG = 1
NICEST = 19


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when the thread that spawned it ends; returns only if it still lives."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def warm_up(init: Message, channel: Channel, page: Page) -> tuple[Session, dict[str, Any]] | None:
    """Imports, loads the job and starts the servers, in a thread of lowest priority: a replacement must not slow those
    that train. The main thread stays as it is, because an unprivileged process cannot raise a priority again."""
    out: list[tuple[Session, dict[str, Any]] | ElasticError] = []

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICEST)
        try:
            from elastic.engine.fingerprint import fingerprint
            from elastic.engine.session import Session

            out.append((Session(init, channel.send, page), fingerprint()))
        except ElasticError as error:
            out.append(error)
        except Exception as error:  # noqa: BLE001 - reported to the agent
            name = type(error).__name__
            out.append(UserCodeError(f"{name} while starting: {error}", detail=traceback.format_exc()))

    thread = threading.Thread(target=work, name="warm-up")
    thread.start()
    thread.join()
    if isinstance(out[0], ElasticError):
        channel.send({"ev": "error", "epoch": 0, "step": 0, "error": out[0].as_json(), "at": 0.0})
        return None
    return out[0]


def main(fd: int, parent: int, page_fd: int) -> None:
    die_with(parent)
    # The agent decides when to stop; Ctrl-C in a terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    messages = iter(channel)
    init = next(messages, None)
    if init is None:
        return
    page = Page(page_fd)
    threading.Thread(target=page.beat, name="page", daemon=True).start()
    warm = warm_up(init, channel, page)
    if warm is None:
        return
    session, numerics = warm
    commands: queue.Queue[Message] = queue.Queue()

    def listen() -> None:
        for message in messages:
            match message["op"]:
                case "stop":
                    session.request_stop()
                case "freeze":
                    # A thread of its own: a newer freeze must not wait for this one.
                    threading.Thread(
                        target=session.freeze, args=(message["epoch"], message["timeout_s"]), daemon=True
                    ).start()
                case "form":
                    command = session.offer(message)
                    if command is not None:
                        commands.put(command)
        os._exit(0)  # the agent is gone, or done with this worker: whatever runs here counts no more

    threading.Thread(target=listen, name="listen", daemon=True).start()
    channel.send(
        {
            "ev": "ready",
            "pid": os.getpid(),
            "store": session.store_address,
            "layers": session.layers_address,
            "fingerprint": numerics,
        }
    )
    while True:
        session.run(commands.get())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
