"""``opgraft`` with slow steps, whose engine breaks when a signal says so.

SIGUSR1 fails a step, SIGUSR2 its thread, and SIGHUP has a step never end.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from opgraft.cli import main
from opgraft.engine.core import EngineCore
from opgraft.engine.workers.worker import Worker

SECONDS = float(os.environ.get("STEP_SECONDS", "0"))
noted: list[int] = []
execute, step = Worker.execute, EngineCore.step


def slow(worker: Worker, scheduled: Any) -> Any:
    time.sleep(10**6 if signal.SIGHUP in noted else SECONDS)
    if signal.SIGUSR1 in noted:
        noted.clear()
        raise RuntimeError("kernel trouble in /secret/place.so")
    return execute(worker, scheduled)


def broken(core: EngineCore) -> Any:
    if signal.SIGUSR2 in noted:
        raise SystemExit("the thread is dead")
    return step(core)


if __name__ == "__main__":
    Worker.execute, EngineCore.step = slow, broken  # type: ignore[method-assign]
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, lambda number, frame: noted.append(number))
    main()
