"""The report of a process: opgraft's kernels in vLLM, each with its number of calls.

vLLM kills its workers, so a report at the end would never be written. Instead the file is mapped
into memory, and each call writes its number. So the file is right at any time.
"""

from __future__ import annotations

import glob
import json
import logging
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed
from opgraft.plugins.bridges import described, report_file

WIDTH = 20
"""Bytes of a number in the file. JSON allows blanks in front of a number."""


@dataclass
class Row:
    """A kernel in the report.

    Attributes:
        report: the report of the row.
        told: the fields of the row, but for the number of calls.
        calls: the number of calls so far.
        place: the position of the number in the file.
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


@dataclass
class Report:
    """The report of this process.

    Attributes:
        path: the path of the file, or None if nobody asked for a report, or if the file cannot be
            written. The first layer makes the file, because vLLM has processes without layers.
        rows: the kernels.
        left: part of vLLM → the reason why it keeps its own kernels.
        memory: the mapped file, or None before the file is made.
    """

    path: Path | None = field(default_factory=lambda: _absolute(report_file()))
    rows: list[Row] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    memory: mmap.mmap | None = None

    def add(self, **told: Any) -> Row:
        """Add a kernel."""
        row = Row(self, told)
        self.rows.append(row)
        return row

    def leave(self, part: str, reason: str) -> None:
        """Note that a part of vLLM keeps its own kernels."""
        is_new = self.left.get(part) != reason
        self.left[part] = reason
        if is_new and self.memory is not None:
            self._write()

    def remove_old(self) -> None:
        """Remove the files that an earlier run has left."""
        if self.path is None:
            return
        ranked = self.path.parent.glob(f"{glob.escape(self.path.stem)}.*rank*{self.path.suffix}")
        for old in (self.path, *ranked):
            with suppress(OSError):
                old.unlink()

    def begin(self, data_parallel_index: int) -> None:
        """Make the file of this process, unless there is one."""
        if self.path is None or self.memory is not None:
            return
        self.path = _of_this_rank(self.path, data_parallel_index)
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(self._text())
            os.replace(temporary, self.path)
            with self.path.open("r+b") as file:
                self.memory = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            logging.getLogger("vllm.opgraft").warning("no report of opgraft: %s", described(error))
            self.path = self.memory = None

    def _text(self) -> bytes:
        """Return the JSON, and note the place of each number."""
        about = {
            "schema": "opgraft.vllm/1",
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


def _absolute(path: Path | None) -> Path | None:
    # vLLM may change the folder.
    return None if path is None else path.absolute()


def _of_this_rank(path: Path, data_parallel_index: int) -> Path:
    """Return the path for this process: ranks and replicas above 0 have a file each."""
    is_rank = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if is_rank else 0
    replica = f".replica{data_parallel_index}" if data_parallel_index else ""
    if rank or replica:
        return path.with_name(f"{path.stem}{replica}.rank{rank}{path.suffix}")
    return path


def _version_of_vllm() -> str:
    import vllm

    return str(vllm.__version__)


REPORT = Report()
"""The report of this process."""
