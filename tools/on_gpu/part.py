"""The process of a part: ``python -m on_gpu.part MODULE ROWS BUNDLE SECONDS``."""

from __future__ import annotations

import faulthandler
import importlib
import sys
from pathlib import Path

from on_gpu.rows import Rows

BEFORE_THE_END = 2.0
"""Seconds before a part is killed, at which it writes to its log where each thread stands."""


def main(module: str, rows: str, bundle: str, seconds: str) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, float(seconds) - BEFORE_THE_END))
    importlib.import_module(module).run(Rows(Path(rows)), Path(bundle))


if __name__ == "__main__":
    main(*sys.argv[1:])
