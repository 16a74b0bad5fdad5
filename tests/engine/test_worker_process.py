"""The worker in a process of its own does what one in this process does, and nobody waits for it in vain."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from opgraft import LLM, SamplingParams
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.sampling import Grammar
from opgraft.engine.workers.executors import executor_of
from opgraft.engine.workers.process_executor import LocalProcess, ProcessExecutor
from opgraft.engine.workers.started_process import EARLY
from opgraft.engine.workers.worker_process import _answer, portable
from opgraft.errors import (
    CheckpointError,
    DistributedError,
    EngineError,
    InputError,
    OpgraftError,
    RequestError,
)
from opgraft.machine.channel import Channel, encoded
from opgraft.ops import RMSNorm
from support.engines import prompts, replaced, settings
from support.random_decoders import written
from support.ranks import Ranks
from support.small_tokenizers import trained_tokenizer
from support.warm import interpreter

pytestmark = pytest.mark.usefixtures("few_objects", "warm_workers")

IN_ITS_PROCESS: dict[str, Any] = {
    "parallel.executor": "processes",
    "model.dtype": "float32",
    "model.max_model_len": 64,
    "cache.num_blocks": 64,
    "load.progress": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worker") / "llama"
    sizes = {"vocab_size": 400, "max_position_embeddings": 128, "num_hidden_layers": 1}
    written("Llama", folder, **sizes)
    trained_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path, warm_workers: None) -> Iterator[LLM]:
    llm = LLM(str(folder), **IN_ITS_PROCESS)
    yield llm
    llm.shutdown()


def executor(llm: LLM) -> ProcessExecutor:
    found = llm.engine.core.executor
    assert isinstance(found, ProcessExecutor)
    return found


def process_of(executor: ProcessExecutor, rank: int = 0) -> subprocess.Popen[bytes]:
    worker = executor.workers.links[rank]
    assert isinstance(worker, LocalProcess)
    return worker.process


def pid(executor: ProcessExecutor) -> int:
    return process_of(executor).pid


def test_grammars_are_compiled_there_once_and_forgotten(llm: LLM) -> None:
    """A step names a grammar that the process knows already; it forgets those that are in use no more."""
    params = SamplingParams(
        temperature=0, max_tokens=4, structured_output={"choice": ["yes", "no"]}
    )
    first, second = llm.generate(["a", "b"], params)
    assert {first.outputs[0].text, second.outputs[0].text} <= {"yes", "no"}
    process = executor(llm)
    shared = len(process.workers.grammars.shared)
    llm.generate("c", params)
    assert len(process.workers.grammars.shared) == shared
    llm.engine.inputs.grammars._kept.clear()
    llm.generate("d")  # whose step takes the place of the last one, which has a grammar
    gc.collect()
    assert len(process.workers.grammars.shared) == 0
    assert len(process.workers.grammars.forgotten) == shared
    llm.generate("c", params)
    assert not process.workers.grammars.forgotten


def test_a_step_does_not_wait_for_a_grammar_that_it_has_not(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the worker compiles a grammar for long, steps with others go on."""
    known = SamplingParams(temperature=0, max_tokens=4, structured_output={"choice": ["yes", "no"]})
    expected = llm.generate("a", known)[0].outputs
    slow = Grammar({"choice": ["slow"]}, llm.engine.inputs.grammars._tokens)
    ours, theirs = map(Channel, socket.socketpair())
    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as threads:
        patched.setattr(executor(llm).workers.links[0], "beside", ours)
        sharing = threads.submit(executor(llm).share, slow)
        name, *_ = theirs.receive()
        try:
            assert threads.submit(llm.generate, "a", known).result(30)[0].outputs == expected
            assert not sharing.done()
        finally:
            theirs.send((0, True, None))
        sharing.result(30)
    assert name == id(slow)
    ours.close()
    theirs.close()


def test_grammars_are_compiled_while_steps_run(llm: LLM) -> None:
    """Steps and grammars cross from two threads at once, and each gets its own answers."""
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = llm.generate("a", plain)[0].outputs
    grammars = [
        Grammar({"choice": [f"{number}"]}, llm.engine.inputs.grammars._tokens)
        for number in range(50)
    ]
    with ThreadPoolExecutor(1) as threads:
        sharing = threads.submit(lambda: [executor(llm).share(grammar) for grammar in grammars])
        for _ in range(5):
            assert llm.generate("a", plain)[0].outputs == expected
        sharing.result(60)
    assert all(grammar in executor(llm).workers.grammars.shared for grammar in grammars)
    impossible = Grammar({"choice": ["x"]}, llm.engine.inputs.grammars._tokens)
    impossible.spec = {"json": {"type": "integer", "minimum": 5, "maximum": 3}}
    with pytest.raises(InputError, match="Unsatisfiable schema"):
        executor(llm).share(impossible)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Fills with the processes of workers that are started."""
    found: list[subprocess.Popen[bytes]] = []
    start = ProcessExecutor.start

    def noting(self: ProcessExecutor) -> None:
        start(self)
        found.append(process_of(self))

    monkeypatch.setattr(ProcessExecutor, "start", noting)
    return found


def test_what_the_worker_raises_is_raised_here(
    llm: LLM, started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """An error keeps its type; a checkpoint that cannot be read is one of the checkpoint, and leaves no process."""
    with pytest.raises(AttributeError, match="no_such_method"):
        executor(llm).call("no_such_method")
    with pytest.raises(CheckpointError, match="nowhere"):
        EngineCore(replaced(settings(tmp_path / "nowhere"), parallel={"executor": "processes"}))
    assert [process.returncode for process in started] == [0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache.num_blocks": 1}, "the cache has room for 1 blocks"),
        ({"model.max_model_len": 9999}, "was made for contexts of up to 128 tokens"),
        (
            {"model.name": "minilm", "model.max_model_len": 9999},
            "the encoder minilm has positions for 512",
        ),
    ],
    ids=["cache", "context", "encoder"],
)
def test_an_engine_that_cannot_be_made_leaves_no_process(
    folder: Path, started: list[subprocess.Popen[bytes]], changed: dict[str, Any], message: str
) -> None:
    """Whatever keeps it from being made, its worker and the model in that are gone when the error is there."""
    with pytest.raises(OpgraftError, match=message):
        LLM(**IN_ITS_PROCESS | {"model.name": str(folder)} | changed)
    assert [process.returncode for process in started] == [0]


def test_an_engine_without_tokenizer_files_that_can_be_read_leaves_no_process(
    folder: Path, started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """What fails behind the core, as the tokenizer does, ends the worker too."""
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(OpgraftError, match=r"tokenizer"):
        LLM(str(tmp_path / "broken"), **IN_ITS_PROCESS)
    assert [process.returncode for process in started] == [0]


def test_an_engine_that_nobody_has_any_more_leaves_no_process(
    folder: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """An engine that is dropped without a shutdown ends its worker, also if it has served a request."""
    core = EngineCore(replaced(settings(folder), parallel={"executor": "processes"}))
    core.add([Request("a", prompts(5)[0], SamplingParams(max_tokens=1))])
    core.step()
    del core
    gc.collect()
    assert [process.returncode for process in started] == [0]


def test_an_error_that_cannot_be_pickled_is_told_in_words() -> None:
    """What another process cannot have as it is, comes as an error that names it."""

    class LocalError(Exception):
        pass

    class ChangedError(Exception):
        def __init__(self, number: int) -> None:
            super().__init__(f"number {number}")

    assert (
        str(portable(LocalError("of a function"))) == "the worker raised LocalError: of a function"
    )
    assert str(portable(ChangedError(3))) == "the worker raised ChangedError: number 3"
    kept = ValueError("as it is")
    assert portable(kept) is kept


def test_logits_processors_are_refused_alone(llm: LLM) -> None:
    """A function of this process cannot run there: the request that has one is refused, and others go on."""
    with pytest.raises(
        RequestError, match=r"logits processors.*set parallel.executor to in_process"
    ):
        llm.generate("a", SamplingParams(logits_processors=(lambda output, logits: logits,)))
    assert (
        llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].finish_reason
        == "length"
    )


class OfThisScript(str):
    """A text of a class that a worker's process cannot import."""

    __slots__ = ()


@pytest.mark.parametrize("kind", ["of a script", "local"])
def test_what_cannot_leave_this_process_is_refused_alone(
    llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with a text of a class that the worker does not have is refused, and others go on."""

    class Local(str):
        __slots__ = ()

    monkeypatch.setattr(OfThisScript, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "OfThisScript", OfThisScript, raising=False)
    stop = OfThisScript("x") if kind == "of a script" else Local("x")
    with pytest.raises(
        RequestError, match=r"cannot be sent to the process of the model.*(OfThisScript|Local)"
    ):
        llm.generate(["b", "a"], [SamplingParams(), SamplingParams(stop=[stop])])
    assert (
        llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].finish_reason
        == "length"
    )


class Unreadable:
    """An object that can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_result_that_cannot_be_sent_is_told() -> None:
    """The outcome is an error that says so, and the next message is answered; the end of the other side is the end."""
    ours, theirs = map(Channel, socket.socketpair())
    answering = threading.Thread(
        target=_answer, args=(theirs, lambda good: "fine" if good else threading.Lock())
    )
    answering.start()
    ours.send((False,))
    number, done, error = ours.receive()
    assert (number, done, type(error)) == (0, False, TypeError)
    ours.send((True,))
    assert ours.receive() == (1, True, "fine")
    ours.close()
    answering.join(30)
    assert not answering.is_alive()
    theirs.close()


def test_a_message_that_cannot_be_read_is_told(llm: LLM) -> None:
    """The worker tells what it raised, by either channel, and takes the next one."""
    process = executor(llm)
    for call in (
        lambda: process.call("max_context", Unreadable()),
        lambda: process.workers.ask_beside(encoded((1, Unreadable(), None, ()))),
    ):
        with pytest.raises(ValueError, match="no number"):
            call()
    assert process.call("max_context") == 64
    choice = SamplingParams(
        temperature=0, max_tokens=4, structured_output={"choice": ["no", "yes"]}
    )
    assert llm.generate("a", choice)[0].outputs[0].text in ("no", "yes")


def test_a_killed_process_is_told_and_nothing_hangs(folder: Path) -> None:
    """Its requests fail with the status that it ended with, and the engine is not healthy any more."""
    core = EngineCore(replaced(settings(folder), parallel={"executor": "processes"}))
    core.check_health()
    core.add([Request("a", prompts(5)[0], SamplingParams(max_tokens=9))])
    assert isinstance(core.executor, ProcessExecutor)
    os.kill(interpreter.process_of(pid(core.executor)), signal.SIGKILL)
    os.waitid(
        os.P_PID, pid(core.executor), os.WEXITED | os.WNOWAIT
    )  # it may answer until the signal has reached it
    (news,) = core.step()
    assert news.finish_reason == "error"
    assert "the process of the worker has ended, with the status -9" in str(news.error)
    with pytest.raises(EngineError, match="status -9"):
        core.check_health()
    core.shutdown()
    with pytest.raises(EngineError, match="status -9"):
        core.executor.call("max_context")


def refused(folder: str) -> str:
    with pytest.raises(DistributedError) as caught:
        EngineCore(replaced(settings(Path(folder)), parallel={"executor": "processes"}))
    return str(caught.value)


def test_ranks_have_their_workers_in_themselves(folder: Path) -> None:
    """A process beside a rank would be in none of its groups, and load the whole model: it is refused."""
    with Ranks(2) as two:
        for told in two.run(refused, str(folder)):
            assert "this process is one of 2 ranks" in told
            assert "set it to external" in told


def test_a_replacement_that_the_worker_would_not_have_is_refused(folder: Path) -> None:
    """What a script registers is not in the worker, which so would compute without it and never tell."""

    class OwnNorm(RMSNorm):
        def forward_oot(self, x: Any, residual: Any = None) -> Any:
            raise NotImplementedError

    RMSNorm.register_oot(OwnNorm)
    try:
        with pytest.raises(
            EngineError,
            match=r"OwnNorm is active for the process of .* none for rank 0.*set parallel.executor to in_process",
        ):
            LLM(str(folder), **IN_ITS_PROCESS)
    finally:
        RMSNorm.unregister_oot(OwnNorm)


def test_a_lost_worker_takes_no_more_prompts(folder: Path) -> None:
    """Those that it had end with the error; those that come then are refused, with no answer, and nothing is left."""
    llm = LLM(str(folder), **IN_ITS_PROCESS)
    os.kill(interpreter.process_of(pid(executor(llm))), signal.SIGKILL)
    process_of(executor(llm)).wait()
    for _ in range(2):
        with pytest.raises(
            EngineError, match="the process of the worker has ended, with the status -9"
        ):
            llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    assert not llm.engine.has_work
    llm.shutdown()
    with pytest.raises(EngineError, match="was shut down"):
        llm.generate("a")


def test_a_second_interrupt_is_told_to_later_prompts(folder: Path) -> None:
    """It ends the worker in the middle of a step: later prompts are refused with the reason, not answered by errors."""
    llm = LLM(str(folder), **IN_ITS_PROCESS)
    os.kill(interpreter.process_of(pid(executor(llm))), signal.SIGSTOP)
    main = threading.get_ident()
    timers = [
        threading.Timer(after, signal.pthread_kill, (main, signal.SIGINT)) for after in (0.5, 1.0)
    ]
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=9))
    for timer in timers:
        timer.join()
    with pytest.raises(EngineError, match="an interrupt came in the middle of a step"):
        llm.generate("a")
    assert not llm.engine.has_work
    llm.shutdown()


def test_an_interrupt_while_a_grammar_is_shared_ends_the_process(folder: Path, llm: LLM) -> None:
    """The main thread shares grammars. Nobody knows how much of a message has come, so the worker cannot go on."""
    grammar = Grammar({"choice": ["yes", "no"]}, llm.engine.inputs.grammars._tokens)
    process = executor_of(replaced(settings(folder), parallel={"executor": "processes"}).resolved())
    process.start()
    assert isinstance(process, ProcessExecutor)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        os.kill(interpreter.process_of(pid(process)), signal.SIGSTOP)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            process.share(grammar)
    finally:
        # A late alarm would end the whole test run.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for use in (
        lambda: process.call("max_context"),
        lambda: process.share(grammar),
        process.check_health,
    ):
        with pytest.raises(
            EngineError, match="an interrupt came while the process of the worker was asked"
        ):
            use()
    assert process_of(process).returncode is not None


class TestProcessStartedEarly:
    """``opgraft serve`` starts the process of the worker before it imports torch."""

    def test_the_first_executor_takes_it(self, folder: Path) -> None:
        before = set(own_children())
        with EARLY.running():
            (early,) = set(own_children()) - before
            llm = LLM(str(folder), **IN_ITS_PROCESS)
            assert process_of(executor(llm)).pid == early
            second = LLM(str(folder), **IN_ITS_PROCESS)
            assert process_of(executor(second)).pid != early
        # It is the executor's now.
        assert process_of(executor(llm)).poll() is None
        for each in (llm, second):
            assert each.generate("the cat", SamplingParams(max_tokens=3, ignore_eos=True))
            each.shutdown()

    @pytest.mark.parametrize("changed", ["variable", "path"])
    def test_one_that_has_missed_a_change_is_not_taken(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, changed: str
    ) -> None:
        before = set(own_children())
        with EARLY.running():
            (early,) = set(own_children()) - before
            if changed == "variable":
                monkeypatch.setenv("OF_A_PLUGIN", "1")
            else:
                monkeypatch.syspath_prepend(str(folder))
            llm = LLM(str(folder), **IN_ITS_PROCESS)
            assert process_of(executor(llm)).pid != early
            assert early not in own_children()
        llm.shutdown()

    def test_one_that_nobody_takes_ends(self) -> None:
        before = own_children()
        with suppress(KeyError), EARLY.running():
            assert len(own_children()) == len(before) + 1
            raise KeyError
        assert own_children() == before


def own_children() -> list[int]:
    """The children of this process that run, or that nobody has waited for."""
    files = Path("/proc/self/task").glob("*/children")
    return sorted(int(child) for file in files for child in file.read_text().split())
