"""Write the table of settings into the reference: every setting with its values, default and variable.

Everything comes from the declaration of the settings.
"""

from __future__ import annotations

import re
from pathlib import Path

from opgraft.config import FIELDS, Field, text_of

PAGE = Path(__file__).parents[1] / "docs/reference/settings.md"
_TABLE = re.compile(
    r"(?<=^\| setting \| value \| default \| variable \| \|\n\|---\|---\|---\|---\|---\|\n)(\|.*\n)*", re.M
)


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """Return the page with the table as it must be."""
    return _TABLE.sub(lambda _: "".join(map(_row, FIELDS.values())), text)


def _row(field: Field) -> str:
    default = field.unset if field.default is None else f"`{text_of(field.default)}`"
    return f"| `{field.name}` | {field.words} | {default} | `{field.variable}` | {field.help} |\n"


if __name__ == "__main__":
    main()
