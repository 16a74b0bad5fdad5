"""Ranks of a job, each a process of its own that calls functions of test modules.

They are forked by a server that has imported what takes seconds, opgraft too, whose host each resets.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE = 120.0
"""Seconds that a rank has for an answer."""

IMPORTED = (
    *("torch", "pytest", "transformers", "transformers.models.llama.modeling_llama"),
    *(
        "opgraft.serving.llm",
        "opgraft.engine.workers.worker_process",
        "opgraft.platforms.cpu.platform",
    ),
)
"""What the server imports, where it is installed."""


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
        self.processes: list[ForkServerProcess] = []
        self._start()

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            job = (theirs, rank, self.size, f"file://{self.folder.name}/store", *self.job)
            process = context.Process(target=_serve, args=job, daemon=True)
            process.start()
            self.ends.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of a test module on every rank; return what each returned.

        Raises:
            TimeoutError: one does not answer in time. All are ended, as a late answer would be taken for the next one,
                and others take their place.
        """
        request = pickle.dumps((function.__code__.co_filename, function.__name__, args))
        for end in self.ends:
            end.send_bytes(request)
        answers = []
        for rank, end in enumerate(self.ends):
            if not end.poll(PATIENCE):
                self._end(0)
                self._start()
                raise TimeoutError(f"rank {rank} does not answer")
            answers.append(pickle.loads(end.recv_bytes()))  # noqa: S301  # of our own process
        failed = [
            f"rank {rank}: {answer}" for rank, (good, answer) in enumerate(answers) if not good
        ]
        if failed:
            raise AssertionError("\n".join(failed))
        return [answer for _, answer in answers]

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
