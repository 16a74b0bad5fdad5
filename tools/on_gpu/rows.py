"""The rows that a part reports: written one at a time, so that what a part has found outlives it."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

PASSED, FAILED, MEASURED, NO_DEVICE = "passed", "failed", "measured", "no device"
"""The outcomes of a row: a comparison has passed or failed, a figure was measured, or there is no GPU to ask."""

Figure: TypeAlias = "float | int | str | bool | None"

LONGEST = 600
"""Characters of a detail that are kept."""


@dataclass
class Row:
    """One line of the report.

    Attributes:
        what: was compared or measured.
        outcome: one of the outcomes above.
        detail: why it failed, or what was found.
        figures: by name, for programs that read the report.
    """

    what: str
    outcome: str = PASSED
    detail: str = ""
    figures: dict[str, Figure] = field(default_factory=dict)


class Rows:
    """Takes the rows of a part, and appends each to a file at once.

    Args:
        file: a line of JSON for each row.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed = 0

    def add(self, row: Row) -> None:
        """Write a row down. Several processes may do so at once."""
        self._failed += row.outcome == FAILED
        row.detail = row.detail[:LONGEST]
        line = json.dumps(asdict(row)) + "\n"
        # One call of write for a line, so that the lines of several processes do not mix.
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
        print(f"{row.outcome}: {row.what}: {row.detail}", flush=True)

    def measured(self, what: str, detail: str, **figures: Figure) -> None:
        """Report a figure, which nothing is held against."""
        self.add(Row(what, MEASURED, detail, figures))

    def no_device(self, what: str) -> None:
        """Report that a row needs a GPU, and that there is none."""
        self.add(Row(what, NO_DEVICE))

    @contextmanager
    def attempt(self, what: str) -> Iterator[Row]:
        """Report a row at the end of the block: as failed if the block raises, or if a row within the block has failed.

        The part goes on either way.
        """
        row, before = Row(what), self._failed
        try:
            yield row
        except Exception as error:
            traceback.print_exc()
            row.outcome = FAILED
            row.detail = f"{type(error).__name__}: {error}"
        failed = self._failed - before
        if failed and row.outcome != FAILED:
            row.outcome = FAILED
            row.detail = f"{failed} rows within failed. {row.detail}".rstrip()
        self.add(row)


def expect_equal(found: object, expected: object, name: str) -> None:
    """Raise ``AssertionError`` if a value is not the expected one; the message has both."""
    if found != expected:
        raise AssertionError(f"{name} is {found!r}, expected {expected!r}")


def read_rows(file: Path) -> list[Row]:
    """Return the rows that were written so far; a line that is not complete yet is left out."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows = []
    for line in text.splitlines(keepends=True):
        try:
            rows.append(Row(**json.loads(line)))
        except (ValueError, TypeError):  # cut off where the part was killed, or the disk was full
            continue
    return rows
