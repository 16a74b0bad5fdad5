"""The report of a run: ``results.json`` for programs, ``table.md`` for readers, and ``logs.txt``.

The files are written anew whenever there is news, and each takes its place at once: whoever reads them in the middle of
a run, or after it was killed, finds whole files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from on_gpu.rows import FAILED, MEASURED, NO_DEVICE, PASSED, Row
from on_gpu.runner import Result

SCHEMA = "opgraft.on_gpu/1"
ORDER = (FAILED, MEASURED, PASSED, NO_DEVICE)
"""The outcomes, in the order in which the table has the rows of a part."""


class Report:
    """The three files.

    Args:
        folder: where they go.
        facts: of the machine and the run, by name.
    """

    def __init__(self, folder: Path, facts: Mapping[str, str]) -> None:
        self._folder = folder
        self._facts = facts

    def write(self, results: Sequence[Result]) -> None:
        """Write the files. A file that cannot be written is tried again the next time."""
        self._replace("results.json", json.dumps(self._data(results), indent=1) + "\n")
        self._replace("table.md", table(self._facts, results))
        self._replace("logs.txt", _logs(results))

    def _data(self, results: Sequence[Result]) -> dict[str, Any]:
        parts = [_part(result) for result in results]
        return {"schema": SCHEMA, "facts": dict(self._facts), "parts": parts}

    def _replace(self, name: str, text: str) -> None:
        new = self._folder / f"{name}.new"
        try:
            new.write_text(text, encoding="utf-8", errors="replace")
            os.replace(new, self._folder / name)
        except OSError as error:  # the disk is full: what was written before stays
            print(f"{name} was not written: {error}", file=sys.stderr, flush=True)
            new.unlink(missing_ok=True)


def _part(result: Result) -> dict[str, Any]:
    return {
        "name": result.part.name,
        "title": result.part.title,
        "outcome": result.outcome,
        "reason": result.reason,
        "seconds": round(result.seconds, 1),
        "limit": round(result.limit, 1),
        "rows": [asdict(row) for row in result.rows],
    }


def _logs(results: Sequence[Result]) -> str:
    """Return what the parts printed, one after another."""
    texts = []
    for result in results:
        if result.log is None:
            continue
        try:
            printed = result.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            printed = f"(the log cannot be read: {error})\n"
        texts.append(f"{'=' * 20} {result.part.name}\n{printed}\n")
    return "\n".join(texts)


def table(facts: Mapping[str, str], results: Sequence[Result]) -> str:
    """Return the report as Markdown: the machine, a line for each part, and a line for each row."""
    lines = ["# opgraft on a GPU", "", "| | |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items()]
    lines += ["", "| part | shows | outcome | rows | seconds |", "|---|---|---|---|---|"]
    lines += [_line_of_part(result) for result in results]
    lines += ["", "| part | row | outcome | detail |", "|---|---|---|---|"]
    for result in results:
        for row in sorted(result.rows, key=_rank):
            cells = (result.part.name, row.what, row.outcome, row.detail)
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _rank(row: Row) -> int:
    return ORDER.index(row.outcome) if row.outcome in ORDER else 0


def _line_of_part(result: Result) -> str:
    counts = [f"{result.count(name)} {name}" for name in ORDER if result.count(name)]
    outcome = f"{result.outcome}: {result.reason}" if result.reason else result.outcome
    took = f"{result.seconds:.0f} of {result.limit:.0f}" if result.limit else ""
    cells = (result.part.name, result.part.title, outcome, ", ".join(counts), took)
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Write a text as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def is_fine(results: Sequence[Result]) -> bool:
    """Tell whether every part was run to its end, and nothing failed."""
    return all(result.outcome in (PASSED, MEASURED, NO_DEVICE) for result in results)


def summary(results: Sequence[Result], most: int = 40) -> str:
    """Return the end of what the script prints: a line for each part, and the rows that failed, the first of many."""
    lines = [_line_of_part(result) for result in results]
    failed = [
        f"{result.part.name}: {row.what}: {row.detail[:200]}"
        for result in results
        for row in result.rows
        if row.outcome == FAILED
    ]
    left_out = [f"... and {len(failed) - most} more"] if len(failed) > most else []
    return "\n".join([*lines, "", *failed[:most], *left_out])
