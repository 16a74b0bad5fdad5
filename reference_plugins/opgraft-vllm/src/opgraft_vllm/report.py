"""The report of a process: the kernels that run in vLLM, and the number of calls of each.

vLLM kills its workers, so nothing can be written at the end. The numbers lie in a file that is
mapped into memory: each call writes its number there, and the file is right at any time.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed
from opgraft.hosts import report_file

WIDTH = 20
"""Bytes of a number in the file. JSON allows blanks in front of a number."""


@dataclass
class Row:
    """A kernel in the report.

    Attributes:
        report: the report of the row.
        told: the fields of the row, but for the number of calls.
        calls: the number of calls so far.
        place: of the number in the file.
    """

    report: Report
    told: dict[str, Any]
    calls: int = 0
    place: int = 0

    def count(self) -> None:
        """Count a call."""
        self.calls += 1
        memory = self.report.memory
        if memory is not None:
            memory[self.place : self.place + WIDTH] = b"%*d" % (WIDTH, self.calls)
        elif self.report.path is not None:
            self.report.write()


@dataclass
class Report:
    """The report of this process.

    Attributes:
        path: of the file; ``None`` if nobody asked for a report. The first call of a kernel makes
            the file, as vLLM has processes that run none.
        rows: the kernels.
        left: part of vLLM → the reason why it keeps its own kernels.
        memory: the mapped file; ``None`` until it is made.
    """

    path: Path | None = field(default_factory=report_file)
    rows: list[Row] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    memory: mmap.mmap | None = None

    def add(self, **told: Any) -> Row:
        """Add a kernel."""
        row = Row(self, told)
        self.rows.append(row)
        return row

    def write(self) -> None:
        """Make the file of this process, and map it."""
        if self.path is None:
            return
        path = _of_this_rank(self.path)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_bytes(self._text())
        os.replace(temporary, path)
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)

    def _text(self) -> bytes:
        """Return the JSON, and note the place of each number."""
        about = {
            "schema": 1,
            "host": f"vllm {_version_of_vllm()}",
            "opgraft": version("opgraft"),
            "process": os.getpid(),
            "left": self.left,
        }
        text = json.dumps(about, indent=1).encode().removesuffix(b"\n}") + b',\n "kernels": ['
        for index, row in enumerate(self.rows):
            opening = b",\n  " if index else b"\n  "
            text += opening + json.dumps(row.told).encode().removesuffix(b"}") + b', "calls": '
            row.place = len(text)
            text += b"%*d}" % (WIDTH, row.calls)
        return text + b"\n ]\n}\n"


def _of_this_rank(path: Path) -> Path:
    """Return the path for this process: ranks above 0 have a file each."""
    is_rank = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if is_rank else 0
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def _version_of_vllm() -> str:
    import vllm

    return str(vllm.__version__)


REPORT = Report()
"""The report of this process."""
