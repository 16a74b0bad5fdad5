"""The process of a worker, which makes the calls of a ``RemoteExecutor`` until the engine ends."""

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

from opgraft.base.log import logger, write_json
from opgraft.base.text import described
from opgraft.binding.pluggable_class import choose_class
from opgraft.binding.provenance import exits_as_errors, kernels_told_when_late
from opgraft.config import set_config
from opgraft.distributed import init_distributed
from opgraft.engine.runner.model_runner import gather_on_first_rank
from opgraft.engine.runner.stored_blocks import finish_writing
from opgraft.engine.sampling import Grammar, GrammarTokens
from opgraft.engine.step import step_of
from opgraft.engine.workers.engine_digest import ENGINE, engine_digest, expect_same_digest
from opgraft.engine.workers.started_process import END_SECONDS
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
        """Return the grammar with a name."""
        return self._known[name]

    def take(
        self, name: int, spec: Any, tokens: Sequence[Any] | None, forgotten: Sequence[int]
    ) -> None:
        """Compile a grammar and forget others.

        Args:
            name: the name of the grammar.
            spec: the source of the grammar.
            tokens: arguments of ``GrammarTokens`` for this grammar and later grammars; ``None`` for
                the same tokens as before.
            forgotten: names that no step has any more.

        Raises:
            InputError: the grammar cannot be compiled.
        """
        for other in forgotten:
            self._known.pop(other, None)
        if tokens is not None:
            self._tokens = GrammarTokens(*tokens)
        # The first grammar comes with tokens.
        self._known[name] = Grammar(spec, self._tokens)  # type: ignore[arg-type]


def main(calls_file: int, beside_file: int, pipe_file: int, record_file: int) -> None:
    """Be the process of a worker until the engine closes both sockets.

    Then the process ends, even in a step that hangs. The process ignores interrupts: the engine's
    process gets them too, and finishes its requests first.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for file in (calls_file, beside_file, pipe_file, record_file):
        # If a child had these files, the engine would not see the end of this process.
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
        calls_file: the socket for calls.
        beside_file: the socket for grammars.
        note: takes the stage of the worker.
        ends_process: end the process when the second socket is closed. Otherwise the starter does.
        pipe_file: a pipe for calls, instead of the socket.
    """
    grammars = SharedGrammars()
    beside = Channel(socket.socket(fileno=beside_file))
    threading.Thread(
        target=_take_grammars, args=(beside, grammars, ends_process), daemon=True
    ).start()
    connection = socket.socket(fileno=calls_file)
    calls: Channel
    if pipe_file is None:
        # Over a network, unread data would count as the silence of this host.
        calls = ReadAhead(connection, grammars.named)
    else:
        calls = Channel(connection, grammars.named, pipe_file)
    try:
        calls.send_encoded(framed(greeting()))
        job: WorkerJob = calls.receive()
    # The engine has ended already.
    except (EOFError, OSError):
        return
    if job.writes_json:
        write_json()
    with set_config(job.opgraft_config, origin=ENGINE):
        made = WorkerCalls(job, note)
        _answer(calls, made, made.note_end)
        finish_writing(END_SECONDS / 2)


class WorkerCalls:
    """Makes the calls of the engine, and notes the stage. The first call makes the worker.

    Args:
        job: the job of the worker.
        note: takes the stage.
    """

    def __init__(self, job: WorkerJob, note: Callable[[Progress], None]) -> None:
        self._job = job
        self._tell = note
        self._worker: Worker | None = None
        # The job may have several replicas.
        ranks_of_replica = job.layout.pipeline * job.layout.tensor
        self._answers = job.rank % ranks_of_replica == output_rank(job.layout)
        self._finished = 0
        self._steps = 0
        self._note("starting")

    def __call__(self, method: str, arguments: Sequence[Any], everyone: bool) -> Any:
        """Return the result of a method, or ``UNANSWERED`` if only the output rank answers."""
        if self._worker is None:
            self._worker = self._made()
        if method == EXECUTE_PARTS:
            method = "execute"
            arguments = (step_of(*arguments),)
        stage = STAGES_OF_START.get(method, method)
        if method == "execute":
            self._steps += 1
            stage = f"step {self._steps}"
        self._note(stage)
        result = getattr(self._worker, method)(*arguments)
        return result if everyone or self._answers else UNANSWERED

    def note_end(self, number: int) -> None:
        """Note that a call has ended, or could not be read."""
        self._finished = number + 1
        self._note(f"after {self._stage}")

    def _note(self, stage: str) -> None:
        self._stage = stage.removeprefix("after ")
        self._tell(Progress(self._finished, stage))

    def _made(self) -> Worker:
        """Make the worker, once plugins are loaded and the ranks have joined."""
        job = self._job
        parallel = job.opgraft_config.parallel
        load_plugins()
        expect_same_digest(job.digest, engine_digest(), job.rank)
        if job.meeting is not None:
            self._note("joining ranks")
            chosen: type[Worker] = choose_class(Worker).cls
            chosen.enter_job(job.places)
            # The executor's limit is shorter, as the executor can name the rank that hangs.
            limit = parallel.start_seconds + parallel.step_seconds
            store = _store(job.meeting, timedelta(seconds=limit))
            layout = job.layout
            init_distributed(
                layout.tensor,
                layout.pipeline,
                layout.data,
                rank=job.rank,
                store=store,
                timeout=limit,
            )
            gather_on_first_rank()
        return Worker(job.opgraft_config, job.local_rank, job.local_size)


def _store(meeting: Meeting, patience: timedelta) -> Any:
    """Return the store through which ranks meet: at a host and port, or in a file."""
    if not isinstance(meeting, str):
        host, port = meeting
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=patience
        )
    store = dist.FileStore(meeting)  # type: ignore[attr-defined]
    store.set_timeout(patience)
    return store


def _take_grammars(beside: Channel, grammars: SharedGrammars, exits: bool) -> None:
    """Compile grammars until the engine ends. Then end this process, even in a step that hangs.

    The process also ends if this thread fails, as the engine would wait for ever.
    """
    try:
        _answer(beside, grammars.take)
    except BaseException as error:
        logger.critical("the thread that compiles grammars has ended: %s", described(error))
        os._exit(EngineError.exit_code)
    if exits:
        try:
            finish_writing(END_SECONDS / 2)
        finally:
            os._exit(0)


def _answer(
    channel: Channel,
    function: Callable[..., Any],
    note_end: Callable[[int], None] = lambda number: None,
) -> None:
    """Call a function for each message, and send number and outcome, until the channel is closed.

    The result ``UNANSWERED`` is not sent.

    Args:
        channel: each message has arguments of the function.
        function: returns the result of a message, or raises an error.
        note_end: called with the number of each message, before the outcome is sent.
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
        # The result cannot be pickled, so that no part was sent.
        except Exception as error:
            channel.send((number, False, portable(error)))


def _outcome(channel: Channel, pickled: bytes, function: Callable[..., Any]) -> tuple[bool, Any]:
    """Return True and the result of a call; or False and the error of the call or of unpickling."""
    try:
        with kernels_told_when_late(), exits_as_errors():
            return True, function(*channel.unpickled(pickled))
    except Exception as error:
        return False, portable(error)


def portable(error: Exception) -> Exception:
    """Return an error that another process can unpickle.

    An error that cannot be pickled becomes an ``EngineError`` with its description. Traceback and
    cause are not sent.
    """
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    # The class of the error may raise anything.
    except Exception:
        copy = None
    is_same = type(copy) is type(error) and str(copy) == str(error)
    return error if is_same else EngineError(f"the worker raised {described(error)}")
