"""Ask the conformance kit about every planted kernel; run by ``make test-planted``.

Each kernel is a distribution of its own, judged in a process of its own by the questions of ``opgraft
conformance`` and of ``opgraft plugins check``. Exit code 1: the kit misses more wrong kernels than is
allowed, or accuses a correct one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import opgraft

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from conftest import Site
from opgraft.testing.conformance import FAILED, Conformance, alone
from support.planted.cheats import CHEATS
from support.planted.corners import CORNERS
from support.planted.correct import CORRECT
from support.planted.kernelbench import KERNELBENCH
from support.planted.plant import Plant
from support.planted.subtle import SUBTLE
from timing import machine, this_run

KINDS = {"corner": CORNERS, "cheat": CHEATS, "subtle": SUBTLE, "correct": CORRECT}
"""The plants by kind. All kinds but the last are wrong."""

APART = {"kernelbench": KERNELBENCH}
"""Plants that are asked about by name or kind only, and count for none of the limits."""

FEWEST = {"whole": 57, "brief": 45}
"""The wrong kernels of 60 that a form of the kit must find."""

FORK = multiprocessing.get_context("fork")
"""Processes start with the kit imported, and with no plugin."""

TIME_LIMIT = 1200.0
"""Seconds of a form of the kit, about one plant."""


def install(plant: Plant, folder: Path) -> Path:
    """Install a plant as a distribution; return the folder to import from."""
    site = Site(folder / plant.name)
    site.folder.mkdir()
    site.plugin(plant.name, plant.source)
    if plant.library:
        source = site.folder / f"{plant.name}.cpp"
        source.write_text(plant.library)
        # Not .so: Python would take that for a module.
        library = source.with_suffix(".kernel")
        command = ["g++", "-O2", "-fPIC", "-shared", "-pthread", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
    made: Path = site.folder
    return made


def ask(plugin: str, folder: Path, brief: bool, every: bool, answers: Any) -> None:
    """Send the failed checks of a plugin, with their reasons, in a process of its own.

    Without ``every``, the first failed check is enough.
    """
    sys.path.insert(0, str(folder))
    os.environ["XDG_STATE_HOME"] = str(folder / "states")
    os.chdir(folder)
    opgraft.reset()
    found = []
    with alone(plugin):
        conformance = Conformance(plugin, brief=brief, timed=not brief)
        for case in conformance.cases:
            outcome = conformance.judge(case)
            if outcome.status == FAILED:
                found.append(f"{case}: {outcome.reason[:300]}")
            if found and not every:
                break
    answers.send(found)


def failed(plugin: str, folder: Path, brief: bool, every: bool) -> list[str]:
    """Return the failed checks of a plugin. To end the process is a failure, too."""
    receiving, sending = FORK.Pipe(duplex=False)
    process = FORK.Process(target=ask, args=(plugin, folder, brief, every, sending))
    process.start()
    sending.close()
    found = ["(process): it did not answer in time"]
    if receiving.poll(TIME_LIMIT):
        try:
            found = receiving.recv()
        except EOFError:
            found = ["(process): it ended the process"]
    process.terminate()
    process.join()
    return found


def judge(
    kind: str, plant: Plant, folder: Path, every: bool, forms: Sequence[str]
) -> dict[str, Any]:
    """Return the row of a plant: what it is, and what each form of the kit says."""
    site = install(plant, folder)
    row: dict[str, Any] = {
        "name": plant.name,
        "kind": kind,
        "language": plant.language,
        "fault": plant.fault,
    }
    for form in forms:
        start = time.monotonic()
        row[form] = failed(plant.name, site, form == "brief", every)
        row[f"{form}_seconds"] = round(time.monotonic() - start, 1)
    return row


def in_words(found: Sequence[str]) -> str:
    """Return the names of failed checks."""
    return ", ".join(each.split(":")[0] for each in found) or "-"


def chosen(only: Sequence[str], has_triton: bool) -> Iterator[tuple[str, Plant]]:
    """Yield all plants with their kind, or those of some names or kinds."""
    for kind, plants in (KINDS | APART if only else KINDS).items():
        for plant in plants:
            if plant.language == "Triton" and not has_triton:
                continue
            if not only or plant.name in only or kind in only:
                yield kind, plant


def counted(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return by form of the kit, and by kind, the number of plants for which a check fails."""
    kinds = KINDS | APART
    counts: dict[str, dict[str, int]] = {form: dict.fromkeys(kinds, 0) for form in FEWEST}
    for form, of_kinds in counts.items():
        for row in rows:
            of_kinds[row["kind"]] += bool(row.get(form))
    return counts


def faults_of_the_kit(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield in words how the kit falls short."""
    for form, counts in counted(rows).items():
        accused = [row["name"] for row in rows if row["kind"] == "correct" and row[form]]
        if accused:
            yield f"the {form} kit accuses correct kernels: {', '.join(accused)}"
        found = sum(counts[kind] for kind in KINDS) - counts["correct"]
        if found < FEWEST[form]:
            yield f"the {form} kit finds {found} wrong kernels, expected {FEWEST[form]} or more"


def together(path: Path | None, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with those of other plants in a file, in the order of the plants."""
    kept = json.loads(path.read_text())["plants"] if path and path.exists() else []
    by_name = {row["name"]: row for row in [*kept, *rows]}
    plants = [plant for of_kind in (KINDS | APART).values() for plant in of_kind]
    return [by_name[plant.name] for plant in plants if plant.name in by_name]


def keep(path: Path, rows: Sequence[dict[str, Any]], run: dict[str, str]) -> None:
    """Write rows into a file, with the command and the commit of the last run."""
    table = {"machine": machine(), **run, "counts": counted(rows), "plants": rows}
    path.write_text(json.dumps(table, indent=1) + "\n")


def is_whole(rows: Sequence[dict[str, Any]]) -> bool:
    """Return True if all plants that count for the limits are among the rows."""
    names = {row["name"] for row in rows}
    return all(plant.name in names for of_kind in KINDS.values() for plant in of_kind)


def main() -> int:
    """Judge the plants, print a line for each, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--triton", help="a folder with Triton, for plants in Triton")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--every", action="store_true", help="ask on after the first failed check of a plant"
    )
    parser.add_argument(
        "--brief", action="store_true", help="ask the short form only, and write no table"
    )
    parser.add_argument("only", nargs="*", help="names of plants or kinds; all if none")
    given = parser.parse_args()
    if given.brief and given.json:
        parser.error("--brief asks too little for --json")
    forms = ["brief"] if given.brief else list(FEWEST)
    if given.triton:
        os.environ["TRITON_INTERPRET"] = "1"
        sys.path.append(given.triton)
    run = this_run()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        plants = chosen(given.only, bool(given.triton))
        for row in pool.map(
            lambda each: judge(each[0], each[1], Path(folder), given.every, forms), plants
        ):
            told = [f"{form}: {in_words(row[form])}" for form in forms]
            print(f"{row['kind']} {row['name']}: {'; '.join(told)}", flush=True)
            # After each plant, as all of them may take an hour.
            rows = together(given.json, [*rows, row | {"commit": run["commit"]}])
            if given.json:
                keep(given.json, rows, run)
    print(json.dumps(counted(rows)))
    faults = list(faults_of_the_kit(rows)) if is_whole(rows) and not given.brief else []
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
