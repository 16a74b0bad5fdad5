"""Write the table of the engine's benchmark into its page, from the JSON that is committed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PAGE, DATA = DOCS / "explanation/engine.md", DOCS / "figures/engine.json"
_TABLE = re.compile(
    r"(?<=^\| measured \| value \| target \| \| figures \|\n\|---\|---\|---\|---\|---\|\n)(\|.*\n)*", re.M
)


def main() -> None:
    text = page(PAGE.read_text(encoding="utf-8"), json.loads(DATA.read_text(encoding="utf-8")))
    PAGE.write_text(text, encoding="utf-8")


def page(text: str, data: Mapping[str, Any]) -> str:
    """Return the page with the table as the measurements say."""
    return _TABLE.sub(lambda _: "".join(map(_line, data["rows"])), text)


def _line(row: Mapping[str, Any]) -> str:
    least, most, verdict = row["least"], row["most"], row["verdict"]
    target = f"≥ {least:g}" if least is not None else f"≤ {most:g}" if most is not None else ""
    if verdict == "beyond":
        verdict = f"at most {row['bound']:.3g} here"
    return f"| {row['name']} | {row['measured']:.3g} | {target} | {verdict} | {row['detail']} |\n"


if __name__ == "__main__":
    main()
