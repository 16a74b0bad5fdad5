"""Text for terminals: foreign text made harmless, and tables of aligned columns that fit a width."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from itertools import zip_longest

WIDTH = 80

_JOINERS = "\u200c\u200d"  # Persian words and emoji are spelled with them; they neither move nor hide other text


def printable(text: str) -> str:
    """Return foreign text as one line that a terminal shows and does not obey.

    Text from plugins, packages and files goes through here before it is printed or logged. Terminal sequences, line
    breaks, marks that reorder text and lone surrogates are shown as their escapes, such as ``\\x1b``.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()


def described(error: BaseException) -> str:
    """Return the type and the message of somebody else's exception as one line, even where it cannot be printed."""
    kind = type(error).__name__
    try:
        message = " ".join(str(error).split())
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # a plugin's __str__ may raise whatever it likes
        return printable(f"{kind} (its message cannot be printed: {type(failure).__name__})")
    return printable(f"{kind}: {message}" if message else kind)


def table(rows: Sequence[Sequence[object]], width: int | None = WIDTH) -> list[str]:
    """Lay rows, the header first, out as lines of aligned columns. The widest give way: their cells go on below.

    Without a ``width`` every row is one line.
    """
    texts = [[printable(str(cell)) for cell in row] for row in rows]
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
