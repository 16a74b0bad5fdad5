"""Setting back what code of others changes in the process that it shares with everybody."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opgraft.plugins.changes import Change
from opgraft.plugins.definitions import DEFINITIONS
from opgraft.plugins.process import Look, changes_between, look


class Guard:
    """Looks at the process before and after each of some steps, which follow each other.

    Looking takes time. So what was seen after one step counts as what there is before the next, unless a module was
    imported or ``forget`` was called in between.
    """

    def __init__(self) -> None:
        self._seen: Look | None = None
        self._modules = 0

    def forget(self) -> None:
        """Take note that the process has changed since the last step."""
        self._seen = None

    @contextmanager
    def watching(
        self,
        when: str,
        stays: Callable[[Change], bool],
        report: Callable[[Sequence[Change], Sequence[str]], None],
    ) -> Iterator[None]:
        """Set back what a step, which may raise, changes in the process for others.

        Args:
            when: the step, in words.
            stays: tells of a change that others would meet whether it stays all the same.
            report: called once all is set back, the handlers of logs too, with the changes that stay, and of the
                others with words about what was changed and what came of setting it back.
        """
        if self._seen is None or len(sys.modules) != self._modules:
            self._seen = look()
        before = self._seen
        try:
            with DEFINITIONS.imports_read():
                yield
        finally:
            self._seen = after = look()
            self._modules = len(sys.modules)
            kept, told = list[Change](), list[str]()
            for change in changes_between(before, after):
                if change.stays or stays(change):
                    kept.append(change)
                    continue
                undone = change.set_back()
                self.forget()
                if not change.harmless:
                    told.append(f"changed {change.what} {when}: {undone}")
            report(kept, told)
