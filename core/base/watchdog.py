"""Python's watchdog, which prints all stacks after some time, even if no Python code can run.

A process has one, and each call replaces the former setting. So opgraft sets the watchdog only
where the process is its own: on its command line.
"""

from __future__ import annotations

import faulthandler

_STDERR = 2
"""The file descriptor: a plugin may have closed the stream."""


class Watchdog:
    """Sets Python's watchdog, once the command line has taken it."""

    is_taken = False

    def take(self) -> None:
        """Let opgraft use the watchdog of this process, and print stacks at a crash."""
        faulthandler.enable()
        self.is_taken = True

    def leave(self) -> None:
        """Stop the watchdog, and leave it to others."""
        self.stop()
        self.is_taken = False

    def restart(self, seconds: float) -> None:
        """Print all stacks after some seconds without another call."""
        if self.is_taken:
            faulthandler.dump_traceback_later(seconds, file=_STDERR)

    def stop(self) -> None:
        """Print no stacks."""
        if self.is_taken:
            faulthandler.cancel_dump_traceback_later()


WATCHDOG = Watchdog()
