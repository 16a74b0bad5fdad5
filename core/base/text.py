"""Text for terminals: make foreign text harmless, and lay out tables within a width."""

from __future__ import annotations

import html
import textwrap
import unicodedata
from collections.abc import Sequence
from itertools import zip_longest

WIDTH = 80

_LONGEST = 2000
"""The largest number of characters of a message."""

_JOINERS = "\u200c\u200d"
"""Persian words and emoji need these characters. Other text neither moves nor hides."""


def printable(text: str) -> str:
    """Return foreign text as one harmless line for a terminal.

    All text of plugins, packages and files passes here before printing or logging. Terminal
    sequences, line breaks, reordering marks and lone surrogates become escapes, such as ``\\x1b``.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()


def described(error: BaseException) -> str:
    """Return the type and message of any exception as one line, even if ``str`` of it raises."""
    kind = type(error).__name__
    try:
        message = " ".join(str(error).split())
    except KeyboardInterrupt:
        raise
    # The __str__ of a plugin's class may raise anything.
    except BaseException as failure:
        return printable(f"{kind} (its message cannot be printed: {type(failure).__name__})")
    return printable(shortened(f"{kind}: {message}" if message else kind))


def shortened(text: str) -> str:
    """Return a text, cut if it is very long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def table(rows: Sequence[Sequence[object]], width: int | None = WIDTH) -> list[str]:
    """Lay out rows, the header first, as lines of aligned columns.

    If the rows are too wide, the widest columns become narrower, and their cells continue below.
    Words, such as paths, are broken only if nothing else helps. Without a ``width``, every row is
    one line.
    """
    texts = [[printable(str(cell)) for cell in row] for row in rows]
    columns = list(zip(*texts, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if width is not None:
        room = width - 2 * (len(widths) - 1)
        words = [max(len(word) for word in " ".join(column).split() or [""]) for column in columns]
        # First down to the longest word of each column; then, if need be, into words.
        widths = _narrowed(_narrowed(widths, room, words), room, [1] * len(widths))
    lines = []
    for row in texts:
        lines += _lines_of_row(row, widths)
    return lines


def _lines_of_row(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = []
    for cell, width in zip(row, widths, strict=True):
        # A column of empty cells has the width 0, which wrap() refuses.
        room = max(width, 1)
        parts = textwrap.wrap(cell, room, break_on_hyphens=False)
        cells.append(parts)
    lines = []
    for line in zip_longest(*cells, fillvalue=""):
        padded = []
        for part, width in zip(line, widths, strict=True):
            padded.append(part.ljust(width))
        text = "  ".join(padded)
        lines.append(text.rstrip())
    return lines


def _narrowed(widths: Sequence[int], room: int, least: Sequence[int]) -> list[int]:
    """Narrow the widest columns until all fit into ``room``; no column below its ``least``."""
    narrowed = list(widths)
    while sum(narrowed) > room:
        spare = [index for index, size in enumerate(narrowed) if size > least[index]]
        if not spare:
            break
        narrowed[max(spare, key=lambda index: narrowed[index])] -= 1
    return narrowed


def html_text(text: str) -> str:
    """Return foreign text as a paragraph of HTML for a notebook."""
    return f"<p>{html.escape(printable(text))}</p>"


def html_table(rows: Sequence[Sequence[object]]) -> str:
    """Return rows, the header first, as a table of HTML for a notebook."""
    head, *body = rows
    lines = [_html_row("th", head)]
    lines += [_html_row("td", row) for row in body]
    return f"<table>{''.join(lines)}</table>"


def _html_row(kind: str, cells: Sequence[object]) -> str:
    opening, closing = f'<{kind} style="text-align: left">', f"</{kind}>"
    texts = [html.escape(printable(str(cell))) for cell in cells]
    shown = [f"{opening}{text}{closing}" for text in texts]
    return f"<tr>{''.join(shown)}</tr>"
