"""A clock for the thread that looks at late code: time passes only if a test says so."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

_MOST = 120.0
"""Real seconds to wait for the thread that looks, on a busy machine."""


class Clock:
    """Stands for the module ``time`` in ``opgraft.registry.watching``.

    A slow machine changes nothing. The thread that looks sees every moment, and a step takes only
    the time that the step itself lets pass.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0.0
        self._wakes_at: float | None = None
        self._is_over = False

    def monotonic(self) -> float:
        """Return the time."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let the thread that looks wait until so much time has passed."""
        with self._changed:
            wakes_at = self._now + seconds
            self._wakes_at = wakes_at
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or self._now >= wakes_at)
            self._wakes_at = None

    def passes(self, seconds: float) -> None:
        """Let time pass, with each look at its moment."""
        with self._changed:
            end = self._now + seconds
            while self._now < end:
                self._now = min(end, self._next_look())
                self._changed.notify_all()
            self._next_look()

    def passing(self, seconds: float) -> threading.Lock:
        """Let time pass in another thread, and return a lock that is free afterwards.

        Time begins to pass when the code of the caller waits for the lock. So a look finds the line
        of the caller, as it does for code that waits for a device.
        """
        caller, frame = threading.get_ident(), sys._getframe(1)
        done = threading.Lock()
        done.acquire()

        def run() -> None:
            try:
                eventually(lambda: sys._current_frames().get(caller) is frame)
                self.passes(seconds)
            finally:
                done.release()

        threading.Thread(target=run, daemon=True).start()
        return done

    def end(self) -> None:
        """Let the thread that looks end."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _next_look(self) -> float:
        """Wait until the thread has looked at the present moment, and return the next one."""
        if not self._changed.wait_for(self._has_looked, _MOST):
            raise TimeoutError("no thread looks at late code")
        assert self._wakes_at is not None
        return self._wakes_at

    def _has_looked(self) -> bool:
        return self._wakes_at is not None and self._wakes_at > self._now


def eventually(holds: Callable[[], bool]) -> bool:
    """Wait until a condition holds. Return False if that takes too long on any machine."""
    pause = threading.Event()
    for _ in range(int(_MOST / 0.05)):
        if holds():
            return True
        pause.wait(0.05)
    return False
