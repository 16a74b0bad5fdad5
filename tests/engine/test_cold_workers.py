"""A worker started as users start it: the process that the executor has is the one that computes, and dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from engine.test_lost_workers import GREEDY, left
from engine.test_worker_process import IN_ITS_PROCESS, executor, folder, process_of
from opgraft import LLM
from opgraft.errors import EngineError

__all__ = ["folder"]


def test_a_worker_of_an_ordinary_interpreter(folder: Path) -> None:
    """Its own exit status is told, its session is apart, it has no file of the other rank, and nothing is left.

    It takes seconds to import torch, unlike those of all other tests, which are forked from a process that has it.
    """
    before = left()
    mine, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    llm = LLM(str(folder), **IN_ITS_PROCESS)
    pid = process_of(executor(llm)).pid
    name = Path(f"/proc/{pid}/exe").resolve().name
    assert name.startswith("python")
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/status").read_text().count(f"PPid:\t{os.getpid()}\n") == 1
    opened = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    assert f"pipe:[{os.fstat(theirs).st_ino}]" not in opened
    for end in (mine, theirs):
        os.close(end)
    os.kill(pid, signal.SIGSEGV)
    assert process_of(executor(llm)).wait(30) == -signal.SIGSEGV
    with pytest.raises(EngineError, match=r"with the status -11 \(SIGSEGV\); last stage: after"):
        llm.generate("a", GREEDY)
    llm.shutdown()
    assert left() == before
