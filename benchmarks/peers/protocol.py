"""The conversation between ``benchmarks/engine.py`` and one engine, in a process and an environment of its own.

It needs nothing but the standard library, as these environments have no opgraft. A line of JSON comes on stdin,
``{"prompts": [[token, …], …], "max_tokens": n}``; a line goes to stdout, ``{"seconds": …, "cpu_seconds": …,
"all_cpu_seconds": …, "peak_bytes": …, "tokens": [[token, …], …]}``, where ``all`` is since the process began. The first
line out is ``{"version": …}``, once the engine is ready. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
"""``tokens`` of each prompt, and what else an engine tells of the run."""

Generate = Callable[[list[list[int]], int], Answer]
"""Prompts and how many tokens each is to get → the tokens, greedily chosen, no end of text respected."""


def serve(start: Callable[[str, str], Generate], package: str) -> None:
    """Load ``sys.argv``'s checkpoint in its dtype, tell the package's version, and answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = start(sys.argv[1], sys.argv[2])
    print(json.dumps({"version": version(package)}), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        wall, cpu = time.perf_counter(), cpu_seconds()
        answer = generate(task["prompts"], task["max_tokens"])
        result = {
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": cpu_seconds() - cpu,
            **answer,
        }
        print(
            json.dumps({**result, "all_cpu_seconds": cpu_seconds(), "peak_bytes": peak_bytes()}),
            file=answers,
        )


def cpu_seconds() -> float:
    """Return the CPU time that this process has taken, with those that it started and what they waited for."""
    fields = [
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in _children()
    ]
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = sum(int(ticks) for each in fields for ticks in each[11:15]) / os.sysconf("SC_CLK_TCK")
    return time.process_time() + ended.ru_utime + ended.ru_stime + running


def peak_bytes() -> int:
    """Return the most memory that this process, and those it started, have held."""
    own = _status_kib("self", "VmHWM")
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    running = sum(_status_kib(pid, "VmHWM") for pid in _children())
    return (own + max(children, running)) * 1024


def _children(parent: str = "self") -> list[str]:
    """Return the processes that one has started, with those that these have: vLLM's worker is a child of a child."""
    files = Path(f"/proc/{parent}/task").glob("*/children")
    children = [pid for file in files for pid in file.read_text().split()]
    return children + [each for pid in children for each in _children(pid)]


def _status_kib(pid: str, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)
