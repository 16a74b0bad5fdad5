"""Text for terminals: tables of aligned columns that fit a width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

WIDTH = 80


def table(rows: Sequence[Sequence[object]], width: int | None = WIDTH) -> list[str]:
    """Rows, the header first, as lines of aligned columns. The widest give way, and their cells go on below.

    Without a ``width`` every row is one line.
    """
    texts = [[" ".join(str(cell).splitlines()) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*texts, strict=True)]
    gaps = 2 * (len(widths) - 1)
    while width is not None and sum(widths) + gaps > width and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in texts:
        cells = [textwrap.wrap(cell, max(size, 1)) for cell, size in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            lines.append("  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)).rstrip())
    return lines
