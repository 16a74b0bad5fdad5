"""A bar on stderr for slow work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import rich.progress
from rich.console import Console

Shown: TypeAlias = bool | Callable[..., Any] | None
"""True or False; a class such as ``tqdm.tqdm``, to show its bar; None for a terminal only."""


@contextmanager
def progress_bar(words: str, total: int, shown: Shown = None) -> Iterator[Callable[[int], None]]:
    """Show a bar, and yield a function to call with each number of further items.

    Args:
        words: a name for the items.
        total: the number of items at the end.
        shown: show the bar; by default, if stderr is a terminal. A class such as ``tqdm.tqdm``
            makes a bar of its own.
    """
    if callable(shown):
        with shown(total=total, desc=words) as other_bar:
            yield other_bar.update
        return
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
