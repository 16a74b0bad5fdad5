"""Setting back what code of others changes in the process that it shares with everybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opgraft.plugins.changes import Change
from opgraft.plugins.process import changes_since, look


@contextmanager
def guarded(
    when: str, stays: Callable[[Change], bool], report: Callable[[Sequence[Change], Sequence[str]], None]
) -> Iterator[None]:
    """Look at the process before and after a step, which may raise; set back what others would meet.

    Args:
        when: the step, in words.
        stays: tells of a change that others would meet whether it stays all the same.
        report: called once all is set back, the handlers of logs too, with the changes that stay, and of the others
            with words about what was changed and what came of setting it back.
    """
    before = look()
    try:
        yield
    finally:
        kept, told = list[Change](), list[str]()
        for change in changes_since(before):
            if change.stays or stays(change):
                kept.append(change)
            else:
                told.append(f"changed {change.what} {when}: {change.set_back()}")
        report(kept, told)
