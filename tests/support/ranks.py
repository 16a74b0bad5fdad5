"""Ranks of a job, each a process of its own that calls functions of test modules.

The warm interpreter starts them, which has imported what takes seconds, opgraft too. Each resets its host.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from support.warm.interpreter import warm_interpreter

PATIENCE = 600.0
"""Seconds of the ranks for their answers: on a busy machine, a compiler takes minutes."""

_SETTLING = 20.0
"""Seconds of the other ranks for their answers, after one has failed."""

_STACKS = 2.0
"""Seconds of a process to write its stack."""


class Ranks:
    """Processes over gloo that are one tensor group, unless ``sizes`` says otherwise."""

    def __init__(
        self, size: int, *, path: Sequence[str] = (), plugins: str = "", **sizes: int
    ) -> None:
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("OPGRAFT_")
        }
        environ["OPGRAFT_PLUGINS"] = plugins
        environ["OPGRAFT_COMPILATION_CONFIG_CACHE"] = "false"  # nothing goes to the user's folder
        self.job = (tuple(path), environ, sizes or {"tensor": size})
        self.size = size
        self.ends: list[Connection] = []
        self.processes: list[SpawnProcess] = []
        self._start()

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        interpreter = spawn.get_executable()
        context.set_executable(warm_interpreter())
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            job = (theirs, rank, self.size, f"file://{self.folder.name}/store", *self.job)
            process = context.Process(target=_serve, args=job, daemon=True)
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)
        context.set_executable(interpreter)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of a test module on every rank; return what each returned.

        Raises:
            AssertionError: a rank has failed. The message has the traceback.
            TimeoutError: a rank does not answer in time. The message has the stack. Other ranks
                take the place of all, as a late answer would be taken for the next one.
        """
        request = pickle.dumps((function.__code__.co_filename, function.__name__, args))
        for end in self.ends:
            end.send_bytes(request)
        answers = self._answers()
        silent = [rank for rank in range(self.size) if rank not in answers]
        failed = [f"rank {rank}: {answer}" for rank, (good, answer) in answers.items() if not good]
        told = [*failed, *(f"rank {rank} does not answer:\n{self._stack(rank)}" for rank in silent)]
        if silent:
            self._end(0)
            self._start()
        if told:
            raise (AssertionError if failed else TimeoutError)("\n".join(told))
        return [answers[rank][1] for rank in range(self.size)]

    def _answers(self) -> dict[int, tuple[bool, Any]]:
        """Return the answers by rank. Nobody waits long for ranks that a failed one has left alone."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + PATIENCE
        while len(answers) < self.size:
            open_ends = [end for rank, end in enumerate(self.ends) if rank not in answers]
            ready = wait(open_ends, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for end in ready:
                assert isinstance(end, Connection)
                answer = _answer_of(end)
                answers[self.ends.index(end)] = answer
                if not answer[0]:
                    deadline = min(deadline, time.monotonic() + _SETTLING)
        return answers

    def _stack(self, rank: int) -> str:
        """Return the stacks of the threads of a rank."""
        process = self.processes[rank]
        if not process.is_alive():
            return f"its process has ended with {process.exitcode}"
        os.kill(process.pid or 0, signal.SIGUSR1)
        time.sleep(_STACKS)
        return Path(self.folder.name, f"stack-{rank}").read_text()

    def _end(self, patience: float) -> None:
        while self.ends:
            self.ends.pop().close()  # on which the process ends
        while self.processes:
            process = self.processes.pop()
            process.join(patience)
            process.kill()
        self.folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end(10)


def _answer_of(end: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pickle.loads(end.recv_bytes())  # noqa: S301  # of our own process
    except EOFError:
        return False, "its process has ended"
    return answer


def _serve(
    end: Connection,
    rank: int,
    size: int,
    store: str,
    path: Sequence[str],
    environ: dict[str, str],
    sizes: dict[str, int],
) -> None:
    os.environ.clear()  # which is that of the server's start
    os.environ.update(environ)
    sys.path[:0] = path
    import opgraft
    import torch

    opgraft.reset()
    torch.set_num_threads(1)
    folder = Path(store.removeprefix("file://")).parent
    # The file stays open as long as the process lives.
    stacks = os.open(folder / f"stack-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    faulthandler.register(signal.SIGUSR1, stacks)
    from opgraft.distributed import destroy_distributed, init_distributed

    init_distributed(**sizes, rank=rank, init_method=store)
    while True:
        try:
            file, name, args = pickle.loads(end.recv_bytes())  # noqa: S301  # of the test
        except EOFError:
            break
        try:
            answer = True, getattr(_module(file), name)(*args)
        except Exception:
            answer = False, traceback.format_exc()
        end.send_bytes(pickle.dumps(answer))
    destroy_distributed()


def _module(file: str) -> Any:
    name = f"on_ranks_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
