"""Workers of several processes from start to end: whoever else looks, asks or ends at that moment is told the truth."""

from __future__ import annotations

import gc
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine.test_lost_workers import left
from opgraft.engine.sampling import Grammar, GrammarTokens
from opgraft.engine.workers import worker_link
from opgraft.engine.workers.executors import executor_of
from opgraft.engine.workers.process_executor import LocalProcess, ProcessExecutor
from opgraft.engine.workers.remote_workers import RemoteWorkers, StartedWorkers
from opgraft.engine.workers.worker_link import WorkerLink
from opgraft.engine.workers.worker_process import _answer
from opgraft.errors import ConfigError, EngineError
from opgraft.machine.channel import Channel, PipeSender, encoded
from support.engines import replaced, settings
from support.interrupting import InterruptAt
from support.small_tokenizers import trained_tokenizer
from support.warm.interpreter import process_of

pytestmark = pytest.mark.usefixtures("few_objects", "warm_workers")

LIMIT = 1.0
"""Seconds after which a worker is taken to hang."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = left()
    yield
    gc.collect()
    # A thread that reads what a worker prints ends a moment after the worker.
    end = time.monotonic() + 10
    while left() != before and time.monotonic() < end:
        time.sleep(0.05)
    assert left() == before


Make = Callable[..., ProcessExecutor]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes executors, whose workers have no model, and shuts them down."""
    made: list[ProcessExecutor] = []

    def make(**parallel: Any) -> ProcessExecutor:
        given = {"executor": "processes", "step_seconds": LIMIT, **parallel}
        found = executor_of(replaced(settings(Path("none")), parallel=given).resolved())
        assert isinstance(found, ProcessExecutor)
        made.append(found)
        return found

    yield make
    for each in made:
        each.shutdown()


def started(make: Make, **parallel: Any) -> ProcessExecutor:
    executor = make(**parallel)
    executor.start()
    return executor


def link_of(executor: ProcessExecutor, rank: int = 0) -> LocalProcess:
    link = executor.workers.links[rank]
    assert isinstance(link, LocalProcess)
    return link


def end(executor: ProcessExecutor, number: int, rank: int = 0) -> None:
    """End the process of a worker, or stop it, by a signal, and wait until that is so."""
    process = process_of(link_of(executor, rank).process.pid)
    os.kill(process, number)
    if number == signal.SIGKILL:
        link_of(executor, rank).process.wait(30)
    else:
        while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass


def test_who_has_the_workers_of_before_reaches_none_of_those_that_started(make: Make) -> None:
    """Threads that look, kill, end or ask while others start in their place do it to those that have ended."""
    executor = started(make, restart_workers=3)
    for restarts in (2, 1, 0):
        before, stop = executor.workers, threading.Event()
        end(executor, signal.SIGKILL)

        def look(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                executor.check_health()

        with ThreadPoolExecutor(1) as threads:
            looking = threads.submit(look)
            try:
                executor.restart(lambda: None)
            finally:
                stop.set()
            looking.result()
        before.kill()
        before.end()
        with pytest.raises(EngineError, match="status -9"):
            before.ask_beside(encoded(()))
        executor.check_health()
        assert executor.call_all("synchronize") == [None]
        assert (executor.workers.restarts_left, executor.is_lost, executor.can_restart) == (
            restarts,
            False,
            False,
        )


@pytest.mark.parametrize("fails", ["the model", "the processes", "an interrupt"])
def test_a_restart_that_fails_is_told_by_whoever_is_asked(
    make: Make, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Health, and the next call, say why; each try is counted; what had started has ended."""
    executor = started(make, restart_workers=2)
    tries = []

    def prepare() -> None:
        tries.append(executor.workers.restarts_left)
        executor.check_health()
        raise KeyboardInterrupt if fails == "an interrupt" else ConfigError("too little memory")

    end(executor, signal.SIGKILL)
    assert (executor.is_lost, executor.can_restart) == (True, True)
    executor.check_health()
    if fails == "the processes":
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    reason = {"the model": "too little memory", "the processes": "nowhere/python"}.get(
        fails, "KeyboardInterrupt"
    )
    if fails == "an interrupt":
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                executor.restart(prepare)
    else:
        executor.restart(prepare)
    assert tries == ([] if fails == "the processes" else [1, 0])
    assert (executor.is_lost, executor.can_restart, executor.is_restarting) == (True, False, False)
    for use in (executor.check_health, lambda: executor.call("synchronize")):
        with pytest.raises(
            EngineError, match=rf"could not be started again: .*{reason}.*start the engine"
        ):
            use()


def test_a_worker_that_is_stopped_holds_nobody_up(make: Make) -> None:
    """The compilation of a grammar, and a call that its pipes have no room for, fail in time; the end does not wait."""
    tokens = GrammarTokens(trained_tokenizer())
    executor = started(make, restart_workers=2)
    asks: list[tuple[Callable[[], object], str]] = [
        (
            lambda: executor.share(Grammar({"choice": ["a"]}, tokens)),
            "did not compile a grammar within 1 seconds",
        ),
        (
            lambda: executor.call("synchronize", b"x" * 10_000_000),
            "did not come to the end of a call within 1 seconds",
        ),
    ]
    for ask, reason in asks:
        end(executor, signal.SIGSTOP)
        with pytest.raises(EngineError, match=rf"rank 0 \(after preparing the device\) {reason}"):
            ask()
        with pytest.raises(EngineError, match=reason):
            executor.call("synchronize")
        executor.restart(lambda: None)
    end(executor, signal.SIGSTOP)
    executor.shutdown()
    assert link_of(executor).process.returncode == -signal.SIGKILL


def test_a_shutdown_ends_a_call_of_another_thread(make: Make) -> None:
    """Who waits for a worker is told, and its files are given back when nobody waits at them any more."""
    executor = started(make, step_seconds=300)
    end(executor, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        calling = threads.submit(executor.call, "synchronize")
        while not executor._awaited:
            pass
        executor.shutdown()
        executor.shutdown()
        with pytest.raises(EngineError, match="the engine was shut down"):
            calling.result(30)
    with pytest.raises(EngineError, match="the engine was shut down"):
        executor.check_health()


def test_a_shutdown_while_workers_start_ends_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come too late are ended, and the start says so."""
    executor, start = make(), ProcessExecutor._start_workers

    def shut_down_meanwhile(self: ProcessExecutor) -> StartedWorkers:
        found = start(self)
        self.shutdown()
        return found

    monkeypatch.setattr(ProcessExecutor, "_start_workers", shut_down_meanwhile)
    with pytest.raises(EngineError, match="the engine was shut down"):
        executor.start()


def test_a_worker_that_ends_while_the_others_start_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the one that is told, and not those that wait for it."""
    start = ProcessExecutor._start_workers

    def one_ends(self: ProcessExecutor) -> StartedWorkers:
        found = start(self)
        found.links[1].kill()
        assert found.links[1].ended(30)
        return found

    monkeypatch.setattr(ProcessExecutor, "_start_workers", one_ends)
    executor = make(tensor=2, step_seconds=300)
    with pytest.raises(
        EngineError, match=r"process of rank 1 has ended, with the status -9.*last stage: starting"
    ):
        executor.start()


@pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning"
)  # between its making and its first use
def test_an_interrupt_while_workers_start_leaves_none(make: Make) -> None:
    """Wherever it comes, those that had started are ended, once the executor is shut down."""
    files = (
        "process_executor.py",
        "started_process.py",
        "remote_workers.py",
        "remote_executor.py",
        "worker_link.py",
    )
    interrupted = 0
    for number in range(3, 110, 12):
        executor = make(tensor=2)
        try:
            with InterruptAt(number, files):
                executor.start()
        except KeyboardInterrupt:
            interrupted += 1
        executor.shutdown()
    assert interrupted > 5, interrupted


MESSAGES = ("channel.py", "remote_workers.py", "remote_executor.py")
"""Files that send calls and take replies in."""


INTERRUPTED = "an interrupt came while the process of the worker was asked, which was ended"


class InThread(WorkerLink):
    """The link to a worker in a thread, which keeps what it is told."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.others = socket.socketpair()
        reading, self.writing = os.pipe()
        super().__init__(0, PipeSender(ours, self.writing), Channel(self.others[0]))
        channel = Channel(theirs, pipe=reading)
        kept = SimpleNamespace()

        def answer(method: str, args: tuple[Any, ...], everyone: bool) -> Any:
            return getattr(kept, method)(*args)

        def run() -> None:
            _answer(channel, answer)
            channel.close()
            os.close(reading)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def ended(self, patience: float = 0.0) -> str | None:
        self.thread.join(patience)
        return None if self.thread.is_alive() else "with its thread"

    def kill(self) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        super().hang_up()
        writing, self.writing = self.writing, -1
        if writing >= 0:
            os.close(writing)

    def close(self) -> None:
        super().close()
        self.others[1].close()


def test_an_interrupt_within_a_call(make: Make) -> None:
    """Wherever it comes, the next calls have their own answers, or an error names the interrupt."""
    number = answered = 0
    reasons: list[str] = []
    interrupted = True
    while interrupted:
        number += 1
        interrupted = False
        executor = make()
        executor._take(RemoteWorkers(StartedWorkers([InThread()]), 30.0))
        executor.call("__setattr__", "kept", "before")
        try:
            with InterruptAt(number, MESSAGES):
                executor.call("__setattr__", "kept", "after")
        except KeyboardInterrupt:
            interrupted = True
        try:
            assert executor.call("__getattribute__", "kept") in ("before", "after")
            executor.call("__setattr__", "kept", number)
            assert executor.call("__getattribute__", "kept") == number
            answered += 1
        except EngineError as error:
            reasons.append(str(error))
        executor.shutdown()
    assert len(reasons) > 10
    assert answered > 10
    assert {reason.partition(":")[0] for reason in reasons} == {INTERRUPTED}


def test_an_interrupt_before_a_call_ends_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first byte of a call, the workers know nothing of it, and answer the next one."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    executor = make()
    executor._take(RemoteWorkers(StartedWorkers([InThread()]), 30.0))
    executor.call("__setattr__", "kept", "before")
    with monkeypatch.context() as patched:
        patched.setattr(executor.workers, "_expect_going", interrupt)
        with pytest.raises(KeyboardInterrupt):
            executor.call("__setattr__", "kept", "after")
    assert executor.call("__getattribute__", "kept") == "before"
    executor.shutdown()


def test_a_long_call_and_a_long_answer_do_not_wait_for_each_other(make: Make) -> None:
    """The worker takes in what comes while it sends what nobody reads yet."""
    executor, long = started(make, step_seconds=20), b"x" * 5_000_000
    executor.call("__setattr__", "kept", long)
    first = executor._post("__getattribute__", ("kept",))
    executor.call("__setattr__", "kept", long[:3])
    assert executor._awaited.pop(first) == {0: (True, long)}
    assert executor.call("__getattribute__", "kept") == long[:3]


def test_a_worker_of_another_version_is_told_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says in plain text what it is; where the engine is something else, both are shown, and no job is sent."""
    sent: list[int] = []
    monkeypatch.setattr(worker_link, "__version__", "9.9")  # of this process
    monkeypatch.setattr(RemoteWorkers, "begin", lambda self, rank, job: sent.append(rank))
    with pytest.raises(
        EngineError, match=r'rank 0 has .*"opgraft": "0.*, and the process of the engine .*"9\.9"'
    ):
        started(make)
    assert not sent


def test_a_worker_that_says_nothing_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its first word the limit of the start holds."""
    start = ProcessExecutor._start_workers

    def one_stops(self: ProcessExecutor) -> StartedWorkers:
        found = start(self)
        assert isinstance(found.links[1], LocalProcess)
        os.kill(process_of(found.links[1].process.pid), signal.SIGSTOP)
        return found

    monkeypatch.setattr(ProcessExecutor, "_start_workers", one_stops)
    with pytest.raises(
        EngineError, match=r"rank 1 \(starting\) did not come to the end of a call within 1 seconds"
    ):
        started(make, tensor=2, start_seconds=1)


def test_ranks_meet_where_no_other_user_is(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a folder that is theirs alone while they run, as some groups meet late; the engine listens at no port."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    start, seen = ProcessExecutor._start_workers, []

    def looking(self: ProcessExecutor) -> StartedWorkers:
        found = start(self)
        seen.extend(stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir())
        seen.append(listening())
        return found

    monkeypatch.setattr(ProcessExecutor, "_start_workers", looking)
    executor = started(make, tensor=2)
    assert seen == [0o700, set()]
    assert len(list(tmp_path.iterdir())) == 1
    executor.shutdown()
    assert not list(tmp_path.iterdir())


def listening() -> set[str]:
    """Sockets at which this process listens for others of the network."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    own = {os.readlink(link) for link in links if os.path.islink(link)}
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"} & own


def test_a_channel_is_closed_once_and_for_all_threads() -> None:
    """Who waits at it is told; a number that another file has by then is not closed a second time."""
    here, there = socket.socketpair()
    channel = Channel(here)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(channel.receive)
        while not channel._receiving.locked():
            pass
        number = channel.fileno()
        channel.close()
        with pytest.raises((EOFError, OSError)):
            waiting.result(30)
    other = os.open(os.devnull, os.O_RDONLY)
    assert other == number
    channel.close()
    os.fstat(other)
    os.close(other)
    there.close()


def test_a_message_that_stops_in_the_middle_fails_in_time() -> None:
    """Neither who sends nor who receives waits for ever for the other end."""
    here, there = socket.socketpair()
    channel = Channel(here)
    channel.limit(0.1)
    there.sendall(bytes(encoded("half"))[:-1])
    with pytest.raises(TimeoutError):
        channel.receive()
    with pytest.raises(TimeoutError):
        channel.send(b"x" * 10_000_000)
    channel.close()
    there.close()
