"""The gate between a training thread and whoever wants to end its epoch.

Shut, it lets no collective and no optimizer step begin. A worker is *frozen* when its gate is shut and its training
thread is in neither: it has left the epoch, or it computes a forward or backward pass, at the end of which it leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from elastic.engine.page import Page


class Superseded(Exception):
    """The epoch is over; raised in the training thread, which unwinds."""


class Gate:
    """Belongs to one epoch. ``enter``, ``computing`` and ``working`` are for the training thread, the rest for others.

    Args:
        page: is told what the training thread does.
    """

    def __init__(self, page: Page | None = None) -> None:
        self._page = page or Page()
        self._changed = threading.Condition()
        self._shut = False
        self._computing = False
        self._left = False

    def enter(self) -> None:
        """Called before every collective and optimizer step.

        Raises:
            Superseded: the gate is shut.
        """
        if self._shut:
            raise Superseded

    @contextmanager
    def computing(self, what: str = "") -> Iterator[None]:
        """Around work that touches neither a peer nor the weights: reading samples, forward, backward, loss.

        Raises:
            Superseded: the gate is shut, before or after.
        """
        self._set_computing(True)
        try:
            with self._page.doing("computing", what):
                yield
        finally:
            self._set_computing(False)

    def working(self, what: str) -> AbstractContextManager[None]:
        """Around work on the weights, or on what belongs to no epoch: it is not interrupted, and waits for no peer."""
        return self._page.doing("computing", what)

    def moving(self) -> None:
        """Called in the midst of long work, where it comes forward."""
        self._page.touch()

    def _set_computing(self, value: bool) -> None:
        with self._changed:
            self._computing = value
            if self._shut:
                # Frozen may have been reported while we computed: from here only out.
                self._left = True
                self._changed.notify_all()
                raise Superseded
            self._changed.notify_all()

    def leave(self) -> None:
        """The training thread has left the epoch."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def shut(self) -> None:
        with self._changed:
            self._shut = True

    @property
    def is_shut(self) -> bool:
        return self._shut

    def freeze(self, abort: Callable[[], None], every_s: float, timeout_s: float) -> bool:
        """Shuts the gate and calls ``abort`` until the training thread is frozen; whether it is, in time.

        An operation that starts right after an abort can still hang, hence the repetition.
        """
        self.shut()
        abort()
        waited = 0.0
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._left or self._computing, every_s):
                    return True
            waited += every_s
            if waited > timeout_s:
                return False
            abort()
