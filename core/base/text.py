"""Text for terminals: foreign text made harmless, and tables of aligned columns that fit a width."""

from __future__ import annotations

import html
import textwrap
import unicodedata
from collections.abc import Sequence
from itertools import zip_longest

WIDTH = 80

_LONGEST = 2000  # characters of a message

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
    return printable(shortened(f"{kind}: {message}" if message else kind))


def shortened(text: str) -> str:
    """Return text that somebody else may have made very long as far as anybody reads it."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def table(rows: Sequence[Sequence[object]], width: int | None = WIDTH) -> list[str]:
    """Lay rows, the header first, out as lines of aligned columns. The widest give way: their cells go on below.

    Words, such as paths, are broken only where no width would do otherwise. Without a ``width`` every row is one line.
    """
    texts = [[printable(str(cell)) for cell in row] for row in rows]
    columns = list(zip(*texts, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if width is not None:
        room = width - 2 * (len(widths) - 1)
        words = [max(len(word) for word in " ".join(column).split() or [""]) for column in columns]
        widths = _narrowed(_narrowed(widths, room, words), room, [1] * len(widths))
    lines = []
    for row in texts:
        sizes = [max(size, 1) for size in widths]
        cells = [
            textwrap.wrap(cell, size, break_on_hyphens=False)
            for cell, size in zip(row, sizes, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            lines.append(
                "  ".join(
                    part.ljust(size) for part, size in zip(parts, widths, strict=True)
                ).rstrip()
            )
    return lines


def _narrowed(widths: Sequence[int], room: int, least: Sequence[int]) -> list[int]:
    """Take columns off the widest until all fit into ``room``, as far as each stays as wide as its ``least``."""
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
