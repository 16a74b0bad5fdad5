"""Ranks that die, fail or hang: who asked is told in time, nothing is left behind, and workers start again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import opgraft
import pytest
from conftest import Site
from engine.test_worker_process import IN_ITS_PROCESS, executor, folder, process_of
from opgraft import LLM, OpgraftConfig, SamplingParams, set_config
from opgraft.engine.workers import process_executor
from opgraft.engine.workers.process_executor import LocalProcess
from opgraft.errors import EngineError
from opgraft.plugins.making_locks import write_rows
from support.engines import replaced
from support.locks import PLUGIN, lock
from support.warm import interpreter

__all__ = ["folder"]

pytestmark = pytest.mark.usefixtures("warm_workers")

PLANTED = """
import ctypes, os, signal, time
import opgraft
from opgraft.distributed import get_world_group
from opgraft.engine.workers.worker import Worker

platforms = "any"
if "WITHOUT_PLANTED" in os.environ:
    raise ImportError("not in this environment")


def leave_child():
    if os.fork() == 0:
        time.sleep(8)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise RuntimeError("planted")


FAULTS = {
    None: lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "kill beside a child": leave_child,
    "hang": lambda: time.sleep(1000),
    "hang with the lock": lambda: ctypes.PyDLL(None).sleep(1000),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": fail,
}


class Planted(Worker):
    fault = None

    def plant(self, ranks, fault):
        self.fault = fault if get_world_group().rank in ranks else None

    def nap(self, seconds):
        time.sleep(seconds[get_world_group().rank])

    def execute(self, step):
        fault, self.fault = self.fault, None
        FAULTS[fault]()
        return super().execute(step)

    def load_model(self):
        FAULTS[self.fault]()
        return super().load_model()


@opgraft.hookimpl
def opgraft_register_ops(platform):
    Worker.register_oot(Planted)
"""

LIMIT = 2.5
"""Seconds after which a step is taken to hang."""

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def left() -> dict[str, Any]:
    """What a process can leave behind in itself: descriptors, sockets among them, and children."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    kinds = [os.readlink(link).partition(":")[0] for link in links if os.path.islink(link)]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "descriptors": {kind: kinds.count(kind) for kind in ("socket", "pipe", "/memfd")},
        "children": children,
    }


def shared(pids: Sequence[int]) -> set[Path]:
    """Files by which processes share memory or meet: those that they have open where such files are."""
    text = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    names = {line.split(maxsplit=5)[-1] for line in text.splitlines()} | {
        os.readlink(link) for link in links
    }
    folders = ("/dev/shm/", tempfile.gettempdir() + "/")  # noqa: S108 - looked at
    ours = (
        sys.prefix,
        str(Path(__file__).parents[2]),
        str(Path(tempfile.gettempdir()) / "pytest-of"),
    )
    return {Path(name) for name in names if name.startswith(folders) and not name.startswith(ours)}


@pytest.fixture(scope="module")
def planted(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, warm_workers: None
) -> Iterator[LLM]:
    """An engine of two ranks that have a plugin's worker, in which faults can be planted, and are started again."""
    site = Site(tmp_path_factory.mktemp("site"))
    site.plugin("planted-faults", PLANTED)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(site.folder))
        opgraft.reset()  # another test may have found plugins before
        before = left()
        settings = IN_ITS_PROCESS | {
            "parallel.tensor": 2,
            "parallel.restart_workers": 9,
            "scheduler.max_num_seqs": 2,
        }
        llm = LLM(str(folder), **settings, **{"parallel.step_seconds": LIMIT})
        yield llm
        llm.shutdown()
        assert left() == before


@pytest.fixture(scope="module")
def right(planted: LLM) -> list[list[int]]:
    return tokens(planted)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(["a", "b", "c"], GREEDY)]


@pytest.mark.parametrize(
    ("fault", "ranks", "message"),
    [
        (
            "kill",
            [1],
            r"process of rank 1 has ended, with the status -9 \(SIGKILL.*last stage: step \d",
        ),
        ("kill beside a child", [1], r"process of rank 1 has ended, with the status -9"),
        ("segfault", [0], r"process of rank 0 has ended, with the status -11 \(SIGSEGV\)"),
        pytest.param(
            *(
                "hang with the lock",
                [1],
                r"rank 1 \(step \d+\) did not come to the end of a call.*, and rank 0 wait",
            ),
            marks=pytest.mark.slow,
        ),
        ("stop", [0], r"rank 0 \(step \d+\) did not come to the end of a call.*, and rank 1 wait"),
        (
            "raise",
            [1],
            r"rank 1 has failed \(RuntimeError: planted\), and others would have waited",
        ),
    ],
)
def test_a_lost_rank_ends_all_requests_and_starts_again(
    planted: LLM, right: list[list[int]], fault: str, ranks: list[int], message: str
) -> None:
    """Every open request, also one that waits, ends with an error that names the rank; the next ones are answered."""
    executor(planted).call_all("plant", ranks, fault)
    processes = [process_of(executor(planted), rank) for rank in range(2)]
    files = shared([interpreter.process_of(process.pid) for process in processes])
    started = time.monotonic()
    outputs = planted.generate(["a", "b", "c"], GREEDY)
    took = time.monotonic() - started
    assert took < 5 + LIMIT * ("hang" in fault or fault == "stop"), took
    for output in outputs:
        assert output.outputs[0].finish_reason == "error"
        assert re.search(message, str(output.outputs[0].error))
    assert all(process.returncode is not None for process in processes)
    assert not [file for file in files if file.exists()]
    assert tokens(planted) == right
    assert planted.stats().counters.failed_steps > 0


def test_a_rank_that_ends_while_nobody_asks_is_told(
    planted: LLM, right: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The next request finds workers that have started again, and the log says which one had ended."""
    processes = [process_of(executor(planted), rank) for rank in range(2)]
    processes[1].kill()
    processes[1].wait()
    planted.engine.core.check_health()
    with caplog.at_level("WARNING", "opgraft"):
        assert tokens(planted) == right
    assert "the process of rank 1 has ended, with the status -9" in caplog.text
    assert processes[0].returncode is not None


def test_an_error_of_all_ranks_is_one_of_the_step(planted: LLM, right: list[list[int]]) -> None:
    """Ranks that fail alike are in step afterwards: the requests of the step fail, and the processes stay."""
    before = [process_of(executor(planted), rank) for rank in range(2)]
    executor(planted).call_all("plant", [0, 1], "raise")
    failed, *others = planted.generate(["a", "b", "c"], GREEDY)[::2]
    assert "RuntimeError: planted" in str(failed.outputs[0].error)
    assert [output.outputs[0].finish_reason for output in others] == ["length"]
    assert [process_of(executor(planted), rank) for rank in range(2)] == before
    assert tokens(planted) == right


def test_a_rank_that_hangs_at_the_start_is_named_with_its_stage(
    planted: LLM, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit of the start holds for loading; when the engine may not start workers again, it says so."""
    process = executor(planted)
    process.call_all("plant", [1], "hang")
    given = replaced(planted.opgraft_config, parallel={"start_seconds": 1})
    with monkeypatch.context() as patched:
        patched.setattr(process, "opgraft_config", given)
        with pytest.raises(
            EngineError,
            match=r"rank 1 \(loading the model\) did not come to the end.*within 1 seconds",
        ):
            process.call_all("load_model")
        patched.setattr(process.workers, "restarts_left", 0)
        with pytest.raises(EngineError, match=r"loading the model.*start the engine"):
            planted.generate("a", GREEDY)
    assert tokens(planted) == right


def test_replies_have_one_limit_together(planted: LLM, right: list[list[int]]) -> None:
    """A call does not have it anew with each of them."""
    with pytest.raises(
        EngineError, match=rf"rank 1 \(nap\) did not come to the end of a call within {LIMIT:g} s"
    ):
        executor(planted).call_all("nap", (0.6 * LIMIT, 1.3 * LIMIT))
    assert tokens(planted) == right


def test_a_rank_with_another_environment_stops_the_start(
    planted: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that one rank alone cannot import is shown with what the engine has, and nothing is left."""
    before = left()

    def started(rank: int, environ: Mapping[str, str]) -> LocalProcess:
        other = {"WITHOUT_PLANTED": "1", "ATEN_CPU_CAPABILITY": "default"} if rank == 1 else {}
        return LocalProcess(rank, {**environ, **other})

    monkeypatch.setattr(process_executor, "LocalProcess", started)
    differing = (
        r"rank 1 would compute otherwise.*"
        r"class of worker is planted_faults:Planted of .* for the process of the engine, and .*:Worker of .* for rank 1"
    )
    with pytest.raises(EngineError, match=differing) as caught:
        LLM(str(folder), **IN_ITS_PROCESS | {"parallel.tensor": 2})
    plugin = "planted-faults 1.0"
    told = f"{plugin}, activated for the process of the engine, and {plugin}, failed for rank 1"
    assert f"plugin planted_faults is {told}" in str(caught.value)
    variable = (
        "variable ATEN_CPU_CAPABILITY is none for the process of the engine, and default for rank 1"
    )
    assert variable in str(caught.value)
    assert left() == before


@pytest.mark.parametrize("admitted", [True, False])
def test_a_lockfile_that_no_variable_names(
    folder: Path, site: Site, tmp_path: Path, admitted: bool
) -> None:
    """The process of a worker imports what the engine's lockfile admits, and nothing else."""
    site.plugin(
        "acme",
        f"{PLUGIN}import os, pathlib\npathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\n",
    )
    lock(tmp_path / "opgraft.lock")
    if not admitted:
        write_rows(tmp_path / "opgraft.lock", [])
    opgraft.reset()
    with set_config(OpgraftConfig(lockfile=str(tmp_path / "opgraft.lock"))):
        llm = LLM(str(folder), **IN_ITS_PROCESS)
    llm.shutdown()
    others = {path.stem for path in tmp_path.glob("*.pid")} - {str(os.getpid())}
    assert len(others) == admitted


SCRIPT = """
import os, sys, threading
from opgraft import LLM
llm = LLM(sys.argv[1], tensor_parallel_size=2, max_model_len=64, **{"cache.num_blocks": 64, "load.progress": False})
print(*(worker.process.pid for worker in llm.engine.core.executor.workers.links), flush=True)
threading.Event().wait()
"""


def test_workers_end_with_a_process_that_is_killed(folder: Path) -> None:
    """Nobody tells them: the end of their channels does."""
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        process.kill()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)
