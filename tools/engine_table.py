"""Write the tables of measurements into the page of the engine, from the JSON that is committed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "explanation/engine.md"
TABLES = {"measured": DOCS / "figures/engine.json", "between processes": DOCS / "figures/parallel.json"}
"""The first word of a table's head → the measurements that it has."""


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for head, data in TABLES.items():
        text = page(text, head, json.loads(data.read_text(encoding="utf-8")))
    PAGE.write_text(text, encoding="utf-8")


def page(text: str, head: str, data: Mapping[str, Any]) -> str:
    """Return the page with a table as the measurements say."""
    table = re.compile(
        rf"(?<=^\| {head} \| value \| target \| \| figures \|\n\|---\|---\|---\|---\|---\|\n)(\|.*\n)*", re.M
    )
    return table.sub(lambda _: "".join(map(_line, data["rows"])), text)


def _line(row: Mapping[str, Any]) -> str:
    least, most, verdict = row["least"], row["most"], row["verdict"]
    target = f"≥ {least:g}" if least is not None else f"≤ {most:g}" if most is not None else ""
    if verdict == "beyond":
        verdict = f"at most {row['bound']:.3g} here"
    return f"| {row['name']} | {row['measured']:.3g} | {target} | {verdict} | {row['detail']} |\n"


if __name__ == "__main__":
    main()
