"""A bar on stderr for slow work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.progress
from rich.console import Console


@contextmanager
def progress_bar(
    words: str, total: int, shown: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a bar, and yield a function to call with each number of further items.

    Args:
        words: a name for the items.
        total: the number of items at the end.
        shown: show the bar; by default, if stderr is a terminal.
    """
    console = Console(stderr=True)
    visible = console.is_terminal if shown is None else shown
    with rich.progress.Progress(
        *rich.progress.Progress.get_default_columns(),
        console=console,
        transient=console.is_terminal,
        disable=not visible,
    ) as bar:
        task = bar.add_task(words, total=total)
        yield lambda more: bar.advance(task, more)
