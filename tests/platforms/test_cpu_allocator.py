"""The setting ``cpu_keep_memory``, in processes of their own: what it does cannot be taken back."""

from __future__ import annotations

import os
import subprocess
import sys

import opgraft
import pytest
from opgraft import OpgraftConfig, set_config
from opgraft.errors import PluginError
from opgraft.ops import GELU
from opgraft.platforms.cpu import allocator

needs_glibc = pytest.mark.skipif(
    not allocator._c_library().startswith("glibc"), reason="the C library is not glibc"
)

_COUNT_FAULTS = """
import resource, threading
import opgraft
import torch
from opgraft import OpgraftConfig, set_config

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    x = torch.zeros(1152, 8192)  # 36 MiB: glibc keeps no memory of 32 MiB and more by itself
    for _ in range(30):  # after six the heap of a thread still grows
        x.clone()
    before = faults()
    for _ in range(10):
        x.clone()
    print(faults() - before)

{begin}
{work}
"""
_IN_A_THREAD = "thread = threading.Thread(target=work); thread.start(); thread.join()"
_PAGES = 10 * 1152 * 8192 * 4 // os.sysconf("SC_PAGE_SIZE")


def run(
    python: str, begin: str = "opgraft.load_plugins()", work: str = "work()", **variables: str
) -> tuple[int, str]:
    """Page faults of ten clones of 36 MiB in a fresh process that begins so, and what it logged."""
    command = [python, "-c", _COUNT_FAULTS.format(begin=begin, work=work)]
    environ = {
        **os.environ,
        "OPGRAFT_PLATFORM": "cpu",
        "OPGRAFT_PLUGINS": "",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return int(result.stdout), result.stderr


@needs_glibc
def test_large_tensors_no_longer_fault(warm_python: str) -> None:
    """With the variable set, clones are made in memory that the process has; without it every page of each faults."""
    assert run(warm_python, OPGRAFT_CPU_KEEP_MEMORY="1")[0] < _PAGES // 5_000
    faulted, _ = run(warm_python, OPGRAFT_CPU_KEEP_MEMORY="0")
    assert (
        faulted > _PAGES // 1000
    )  # huge pages, where the kernel gives them unasked, are 512 times fewer


@needs_glibc
@pytest.mark.slow
def test_other_threads_do_not_fault_either() -> None:
    """What holds for the main thread holds for threads that are started later."""
    cold = sys.executable
    assert run(cold, work=_IN_A_THREAD, OPGRAFT_CPU_KEEP_MEMORY="1")[0] < _PAGES // 5_000
    faulted, _ = run(cold, work=_IN_A_THREAD, OPGRAFT_CPU_KEEP_MEMORY="0")
    assert faulted > _PAGES // 1000


@needs_glibc
def test_a_scope_sets_it_for_the_process(warm_python: str) -> None:
    """A scope in which plugins are loaded sets it too, and it stays when the scope ends."""
    begin = "with set_config(OpgraftConfig(cpu_keep_memory=True)):\n    opgraft.load_plugins()"
    assert run(warm_python, begin)[0] < _PAGES // 5_000


def test_other_c_libraries() -> None:
    """Where the C library is not glibc nothing is changed, and the log says so."""
    begin = (
        "from opgraft.platforms.cpu import allocator\n"
        "allocator._c_library = lambda: ''\n"
        "allocator.ctypes = None  # nothing may be called\n"
        "opgraft.load_plugins()"
    )
    _, log = run(sys.executable, begin, OPGRAFT_CPU_KEEP_MEMORY="1")
    assert "cpu_keep_memory has no effect: the C library is not glibc" in log


def test_where_nothing_tells_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without confstr, or on which it does not know the name, is taken for one without glibc."""

    def unknown(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", unknown)
    assert allocator.keep_memory() == "the C library is not glibc"
    monkeypatch.delattr(os, "confstr")
    assert allocator.keep_memory() == "the C library is not glibc"


def test_it_is_decided_once() -> None:
    """A scope that asks for it when plugins are loaded without is told to ask earlier, not ignored."""
    opgraft.load_plugins()
    with (
        set_config(OpgraftConfig(cpu_keep_memory=True)),
        pytest.raises(
            PluginError,
            match="set_config sets cpu_keep_memory to True, but plugins were loaded with False",
        ),
    ):
        GELU()


def test_the_environment_report_shows_it(cli) -> None:
    """``opgraft env`` lists the variable where it is set."""
    result = cli("env", OPGRAFT_CPU_KEEP_MEMORY="1")
    assert "| OPGRAFT_CPU_KEEP_MEMORY | 1 |" in result.stdout
