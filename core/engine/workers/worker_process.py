"""The process of a worker: it makes the calls of a ``RemoteExecutor`` until the engine ends."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

from opgraft.base.text import described
from opgraft.binding.provenance import exits_as_errors, kernels_told_when_late
from opgraft.config import set_config
from opgraft.distributed import init_distributed
from opgraft.engine.runner.model_runner import gather_on_first_rank
from opgraft.engine.sampling import Grammar, GrammarTokens
from opgraft.engine.step import step_of
from opgraft.engine.workers.engine_digest import engine_digest, expect_same_digest
from opgraft.engine.workers.worker import Worker
from opgraft.engine.workers.worker_link import (
    EXECUTE_PARTS,
    STAGES_OF_START,
    Meeting,
    WorkerJob,
    greeting,
    output_rank,
)
from opgraft.engine.workers.worker_progress import Progress, ProgressRecord
from opgraft.errors import EngineError
from opgraft.logger import logger, write_json
from opgraft.machine.channel import Channel, ReadAhead, framed
from opgraft.plugins.host import load_plugins
from torch import distributed as dist

UNANSWERED = object()
"""The result of a call that nobody waits for."""


class SharedGrammars:
    """Grammars that steps name, compiled beside the steps."""

    def __init__(self) -> None:
        self._tokens: GrammarTokens | None = None
        self._known: dict[int, Grammar] = {}

    def named(self, name: int) -> Grammar:
        """Return a grammar by its name."""
        return self._known[name]

    def take(
        self, name: int, spec: Any, tokens: Sequence[Any] | None, forgotten: Sequence[int]
    ) -> None:
        """Compile a grammar and forget others.

        Args:
            name: of the grammar.
            spec: what it is compiled from.
            tokens: arguments of the ``GrammarTokens`` of this grammar and those that follow; None
                for those of before.
            forgotten: names that no step has any more.

        Raises:
            InputError: it cannot be compiled.
        """
        for other in forgotten:
            self._known.pop(other, None)
        if tokens is not None:
            self._tokens = GrammarTokens(*tokens)
        self._known[name] = Grammar(spec, self._tokens)  # type: ignore[arg-type]  # tokens come with the first


def main(calls_file: int, beside_file: int, pipe_file: int, record_file: int) -> None:
    """Be the process of a worker until the engine closes both sockets.

    Then the process ends, even in a step that hangs.

    Signals are for the process of the engine, which finishes its requests first.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for file in (calls_file, beside_file, pipe_file, record_file):
        # A child that had them would keep the engine from seeing the end of this one.
        os.set_inheritable(file, False)
    record = ProgressRecord(record_file)
    record.answer_signals(record_file)
    serve_calls(calls_file, beside_file, record.write, pipe_file=pipe_file)


def serve_calls(
    calls_file: int,
    beside_file: int,
    note: Callable[[Progress], None],
    *,
    ends_process: bool = True,
    pipe_file: int | None = None,
) -> None:
    """Make a worker and its calls, until the other end of both sockets is closed.

    Args:
        calls_file: socket by which calls come.
        beside_file: socket by which grammars come.
        note: is told what the worker does.
        ends_process: end the process when the second socket is closed. Otherwise the starter does.
        pipe_file: pipe by which calls come instead.
    """
    grammars = SharedGrammars()
    beside = Channel(socket.socket(fileno=beside_file))
    threading.Thread(
        target=_take_grammars, args=(beside, grammars, ends_process), daemon=True
    ).start()
    connection = socket.socket(fileno=calls_file)
    calls: Channel
    if pipe_file is None:  # a network, whose silence is noticed if nobody reads
        calls = ReadAhead(connection, grammars.named)
    else:
        calls = Channel(connection, grammars.named, pipe_file)
    try:
        calls.send_encoded(framed(greeting()))
        job: WorkerJob = calls.receive()
    except (EOFError, OSError):  # the engine has ended before
        return
    if job.writes_json:
        write_json()
    with set_config(job.opgraft_config, origin="the process of the engine"):
        made = WorkerCalls(job, note)
        _answer(calls, made, made.note_end)


class WorkerCalls:
    """Makes the calls of the engine, of a worker that the first one makes, and notes the stage that it is at.

    Args:
        job: what the worker is to be.
        note: is told the stage.
    """

    def __init__(self, job: WorkerJob, note: Callable[[Progress], None]) -> None:
        self._job = job
        self._tell = note
        self._worker: Worker | None = None
        self._answers = job.rank % (job.layout.pipeline * job.layout.tensor) == output_rank(
            job.layout
        )
        self._finished = self._steps = 0
        self._note("starting")

    def __call__(self, method: str, arguments: Sequence[Any], everyone: bool) -> Any:
        """Return the result of a method, or ``UNANSWERED`` if only the output rank answers."""
        if self._worker is None:
            self._worker = self._made()
        if method == EXECUTE_PARTS:
            method, arguments = "execute", (step_of(*arguments),)
        self._steps += method == "execute"
        self._note(
            f"step {self._steps}" if method == "execute" else STAGES_OF_START.get(method, method)
        )
        result = getattr(self._worker, method)(*arguments)
        return result if everyone or self._answers else UNANSWERED

    def note_end(self, number: int) -> None:
        """Note that the call of a number has come to its end, or could not be read."""
        self._finished = number + 1
        self._note(f"after {self._stage}")

    def _note(self, stage: str) -> None:
        self._stage = stage.removeprefix("after ")
        self._tell(Progress(self._finished, stage))

    def _made(self) -> Worker:
        """Make the worker, once plugins are loaded and the ranks have joined."""
        job, parallel = self._job, self._job.opgraft_config.parallel
        load_plugins()
        expect_same_digest(job.digest, engine_digest(), job.rank)
        if job.meeting is not None:
            self._note("joining ranks")
            # Longer than the executor waits, which knows who hangs.
            limit = parallel.start_seconds + parallel.step_seconds
            patience = timedelta(seconds=limit)
            sizes = job.layout.tensor, job.layout.pipeline, job.layout.data
            init_distributed(
                *sizes, rank=job.rank, store=_store(job.meeting, patience), timeout=limit
            )
            gather_on_first_rank()
        return Worker(job.opgraft_config, job.local_rank, job.local_size)


def _store(meeting: Meeting, patience: timedelta) -> Any:
    """Return the store by which ranks meet: at a host and port, or in a file."""
    if not isinstance(meeting, str):
        return dist.TCPStore(*meeting, is_master=False, timeout=patience)  # type: ignore[attr-defined]
    store = dist.FileStore(meeting)  # type: ignore[attr-defined]
    store.set_timeout(patience)
    return store


def _take_grammars(beside: Channel, grammars: SharedGrammars, exits: bool) -> None:
    """Take grammars in until the other process has ended, and end this one then, even in a step that hangs.

    It ends too if this thread fails, as the other process would wait for ever.
    """
    try:
        _answer(beside, grammars.take)
    except BaseException as error:
        logger.critical("the thread that compiles grammars has ended: %s", described(error))
        os._exit(EngineError.exit_code)
    if exits:
        os._exit(0)


def _answer(
    channel: Channel,
    function: Callable[..., Any],
    note_end: Callable[[int], None] = lambda number: None,
) -> None:
    """Call a function with each message that comes, and send its number and outcome, until the other end is closed.

    A result that is ``UNANSWERED`` is not sent.

    Args:
        channel: whose messages are arguments of the function.
        function: whose result, or what it raises, is the outcome.
        note_end: called with the number of each message, before its outcome is sent.
    """
    for number in count():
        try:
            pickled = channel.receive_bytes()
        except (EOFError, OSError):
            return
        done, answer = _outcome(channel, pickled, function)
        note_end(number)
        if answer is UNANSWERED:
            continue
        try:
            channel.send((number, done, answer))
        except OSError:
            return
        except Exception as error:  # the result cannot be pickled, and nothing of it was sent
            channel.send((number, False, portable(error)))


def _outcome(channel: Channel, pickled: bytes, function: Callable[..., Any]) -> tuple[bool, Any]:
    """Return True and the result of a call, or False and the error of the call or its arguments."""
    try:
        with kernels_told_when_late(), exits_as_errors():
            return True, function(*channel.unpickled(pickled))
    except Exception as error:
        return False, portable(error)


def portable(error: Exception) -> Exception:
    """Return an error as another process can have it: one that cannot be pickled, as an ``EngineError`` that names it.

    Its traceback and cause stay behind.
    """
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # whatever its class raises
        copy = None
    same = type(copy) is type(error) and str(copy) == str(error)
    return error if same else EngineError(f"the worker raised {described(error)}")
