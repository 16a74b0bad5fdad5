"""A bar on stderr for what takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.progress
from rich.console import Console


@contextmanager
def progress_bar(
    words: str, total: int, shown: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """Show how much is done; what is yielded is called with how much more is.

    Args:
        words: that say what is counted.
        total: that is done at the end.
        shown: whether it is shown at all; where stderr is a terminal, if not given.
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
