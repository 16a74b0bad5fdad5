"""Setting back what code of others changes in the process that it shares with everybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opgraft.plugins.changes import Change
from opgraft.plugins.process import changes_between, look


class Guard:
    """Looks at the process before and after each of some steps, which follow each other.

    What was seen after one step counts as what there is before the next, as looking takes time: nobody else's code runs
    in between, unless ``forget`` is called.
    """

    def __init__(self) -> None:
        self._seen: list[Any] | None = None

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
        before = look() if self._seen is None else self._seen
        try:
            yield
        finally:
            self._seen = after = look()
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
