"""A second process computes long prompts: whatever becomes of it, no bit of an answer changes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from engine.test_worker_process import process_of
from opgraft import SamplingParams
from opgraft.config import HandoverConfig, ModelConfig, OpgraftConfig, ParallelConfig
from opgraft.engine.workers.process_executor import ProcessExecutor
from opgraft.errors import ConfigError
from opgraft.plugins.selection import current_platform
from opgraft.serving.async_llm import AsyncLLM
from opgraft.serving.handover import HandoverEngine
from opgraft.serving.handover_folder import handover_folder
from opgraft.serving.llm import LLM
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.prefill_process import config_of_prefill
from support.engines import prompts
from support.random_decoders import OF_CPU_KERNELS, hybrid, written
from support.warm import interpreter

SHAPE = {**OF_CPU_KERNELS, "max_position_embeddings": 512}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Gemma3": {"sliding_window": 40},
}
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 400,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "cache.num_blocks": 200,
    "cache.block_size": 16,
    "load.progress": False,
    "model.batch_invariant": True,
}
LEAST = 100
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
LONG, OTHER, SHORT = ([token + 3 for token in prompt] for prompt in prompts(301, 240, 9))

Answers = list[list[tuple[Any, ...]]]

pytestmark = pytest.mark.usefixtures("plugin", "warm_workers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family, values in FAMILIES.items():
        found[family] = tmp_path_factory.mktemp("handover") / family
        written(family, found[family], **SHAPE, **values)
    return found


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """The number of threads of this process is that of before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["Llama"]


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[AsyncLLM]:
    """An engine that hands over prompts, and holds nothing of them at the end."""
    llm = AsyncLLM(str(folder), **{**COMMON, "handover.tokens": LEAST, **settings})
    try:
        assert isinstance(llm.engine, HandoverEngine)
        yield llm
        assert not llm.engine._under_way
        for core in (llm.engine.core, other(llm).core):
            assert core.cache.pool.num_free == core.cache.pool.num_blocks
            assert not any((core.cache._tables, core.scheduler._requests, core.scheduler._held))
    finally:
        llm.shutdown()


@pytest.fixture
def right(folder: Path) -> Callable[..., Answers]:
    """Returns the answers of one process."""

    def answer(given: Sequence[list[int]], params: Any = GREEDY) -> Answers:
        with LLM(str(folder), **COMMON) as llm:
            return told(llm.generate(given, params))

    return answer


def told(outputs: Sequence[RequestOutput]) -> Answers:
    return [
        [
            (each.token_ids, each.logprobs, each.finish_reason, output.prompt_logprobs)
            for each in output.outputs
        ]
        for output in outputs
    ]


def other(llm: AsyncLLM) -> Any:
    """The engine of the second process."""
    engine: Any = llm.engine
    return engine.prefill.thread.engine


def process(llm: AsyncLLM) -> int:
    """The id of the second process."""
    return interpreter.process_of(process_of(other(llm).executor).pid)


def signalled(llm: AsyncLLM, number: signal.Signals) -> None:
    os.kill(process(llm), number)


def own_worker(llm: AsyncLLM) -> int:
    """The id of the engine's own process."""
    executor: Any = llm.engine.core.executor
    return interpreter.process_of(process_of(executor).pid)


def until_it_computes(llm: AsyncLLM) -> None:
    engine: Any = llm.engine
    until(lambda: not engine.prefill.fault())


def outcomes(llm: AsyncLLM) -> dict[str, int]:
    return {name: count for name, count in llm.stats().counters.handovers.items() if count}


def asked(llm: AsyncLLM, given: Sequence[list[int]], params: Any = GREEDY) -> Answers:
    """Return the answers to prompts that are asked at once."""
    each = params if isinstance(params, list) else [params] * len(given)

    async def last(prompt: list[int], wanted: SamplingParams) -> RequestOutput:
        async for output in llm.generate(prompt, wanted):
            found = output
        return found

    async def ask() -> Answers:
        return told(await asyncio.gather(*map(last, given, each)))

    return asyncio.run(ask())


class Asked:
    """Answers that another thread asks for."""

    def __init__(self, *arguments: Any) -> None:
        self.found: Any = None

        def ask() -> None:
            try:
                self.found = asked(*arguments)
            except Exception as error:
                self.found = error

        self._thread = Thread(target=ask)
        self._thread.start()

    def wait(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.found


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


KINDS: Sequence[tuple[list[int], dict[str, Any]]] = (
    (LONG, {"temperature": 0, "logprobs": 3}),
    (SHORT, {"temperature": 0, "logprobs": 3}),
    (LONG, {"seed": 3, "logprobs": 1}),
    ([*LONG[:200], *OTHER[:90]], {"seed": 4, "n": 3, "top_p": 0.9, "logprobs": 1}),
    (OTHER, {"seed": 5, "prompt_logprobs": 1, "n": 2}),
    (OTHER[::-1], {"temperature": 0.7, "repetition_penalty": 1.3, "logprobs": 0}),
    # One token behind the last full block, and one short of it.
    (LONG[: 16 * 12 + 1], {"temperature": 0}),
    (LONG[7 : 7 + 16 * 12], {"temperature": 0}),
)


@pytest.mark.parametrize(
    ("family", "executor", "threads"),
    [("Llama", "in_process", 2), ("Llama", "processes", 1), ("Gemma3", "in_process", 1)],
)
def test_all_bits_are_those_of_one_process(
    folders: dict[str, Path],
    family: str,
    executor: str,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy, seeded, several answers, reused beginnings, windows, threads: all numbers have the same bits."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    given = [prompt for prompt, _ in KINDS]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, **kind) for _, kind in KINDS]
    settings = {"parallel.executor": executor}
    with LLM(str(folders[family]), **COMMON, **settings) as plain:
        expected = told(plain.generate(given, params))
    with opened(folders[family], **settings) as llm:
        assert asked(llm, given, params) == expected
        # Two begin like the first one, and may come when it is stored.
        first = outcomes(llm)
        assert first == {"computed": first["computed"], "prompt_logprobs": 1}
        assert 3 <= first["computed"] <= 5
        assert llm.stats().counters.prompt_tokens < 500
        explained = llm.replicas.explain().result(60)
        assert [row.name for row in explained.classes].count("executor") == 2
        # Everything is in the cache now.
        assert asked(llm, given[:4], params[:4]) == expected[:4]
        assert outcomes(llm) == first


def test_a_short_request_overtakes(folder: Path, right: Callable[..., Answers]) -> None:
    """A held prompt holds up no other, and its abort takes it off both processes."""
    expected = right([LONG, SHORT, OTHER])
    with opened(folder) as llm:
        signalled(llm, signal.SIGSTOP)
        held = Asked(llm, [LONG])
        until(lambda: llm.stats().waiting)
        assert asked(llm, [SHORT], GREEDY) == [expected[1]]
        assert llm.stats().waiting == 1
        (held_id,) = llm.replicas.each[0]._streams
        llm.replicas.abort(held_id).result(60)
        ((answer,),) = held.wait()
        assert answer[2] == "abort"
        assert llm.stats().waiting == 0
        signalled(llm, signal.SIGCONT)
        assert asked(llm, [OTHER], GREEDY) == [expected[2]]
        assert outcomes(llm) == {"computed": 1}


def test_a_killed_process_is_replaced(folder: Path, right: Callable[..., Answers]) -> None:
    """Prompts that it computes are computed by the engine at once, and later ones by a new process."""
    expected = right([LONG, SHORT, OTHER])
    with opened(folder) as llm:
        first = process(llm)
        os.kill(first, signal.SIGSTOP)
        pending = Asked(llm, [LONG, SHORT])
        until(lambda: llm.stats().waiting)
        os.kill(first, signal.SIGKILL)
        assert pending.wait() == expected[:2]
        assert outcomes(llm) == {"failed": 1}
        until_it_computes(llm)
        assert process(llm) != first
        assert asked(llm, [OTHER], GREEDY) == expected[2:]
        assert outcomes(llm) == {"failed": 1, "computed": 1}
        # Killed while it has nothing to do.
        signalled(llm, signal.SIGKILL)
        until(lambda: other(llm).executor.is_lost)
        assert asked(llm, [LONG[::-1]], GREEDY) == right([LONG[::-1]])
        assert outcomes(llm)["unavailable"] == 1
        until_it_computes(llm)


def test_a_process_that_hangs_is_waited_for_some_seconds(
    folder: Path, right: Callable[..., Answers]
) -> None:
    """Then the engine computes the prompt, and asks the process nothing more until it goes on."""
    expected = right([LONG, OTHER, LONG[::-1]])
    with opened(folder, **{"handover.seconds": 1}) as llm:
        signalled(llm, signal.SIGSTOP)
        begin = time.monotonic()
        assert asked(llm, [LONG], GREEDY) == expected[:1]
        assert 1 < time.monotonic() - begin < 20
        assert outcomes(llm) == {"late": 1}
        assert asked(llm, [OTHER], GREEDY) == expected[1:2]
        assert outcomes(llm) == {"late": 1, "unavailable": 1}
        signalled(llm, signal.SIGCONT)
        until_it_computes(llm)
        assert asked(llm, [LONG[::-1]], GREEDY) == expected[2:]
        assert outcomes(llm) == {"late": 1, "unavailable": 1, "computed": 1}


def test_a_store_that_cannot_be_written(folder: Path, right: Callable[..., Answers]) -> None:
    """The engine finds no block, and computes the prompt."""
    expected = right([LONG, SHORT])
    with opened(folder) as llm:
        store = Path(str(llm.engine.core.opgraft_config.cache.store))
        shutil.rmtree(store / "opgraft-blocks")
        (store / "opgraft-blocks").write_text("no folder")
        assert asked(llm, [LONG, SHORT], GREEDY) == expected
        assert outcomes(llm) == {"not_stored": 1}


def test_the_engines_own_worker_is_lost(folder: Path, right: Callable[..., Answers]) -> None:
    """Running requests end with the error, and a held one too, or it goes on; later ones are right."""
    expected = right([LONG, SHORT])
    long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    settings = {"parallel.executor": "processes", "parallel.restart_workers": 1}
    with opened(folder, **settings) as llm:
        signalled(llm, signal.SIGSTOP)
        held = Asked(llm, [LONG])
        until(lambda: llm.stats().waiting)
        running = Asked(llm, [SHORT], long)
        until(lambda: llm.stats().running)
        os.kill(own_worker(llm), signal.SIGKILL)
        ((answer,),) = running.wait()
        assert answer[2] == "error"
        signalled(llm, signal.SIGCONT)
        ((answer,),) = held.wait()
        assert answer[2] == "error"
        assert asked(llm, [LONG, SHORT], GREEDY) == expected


def test_an_idle_loss_keeps_held_prompts(folder: Path, right: Callable[..., Answers]) -> None:
    """If the engine's worker is lost while all requests are held, nothing of them is lost."""
    expected = right([LONG, SHORT])
    settings = {"parallel.executor": "processes", "parallel.restart_workers": 1}
    with opened(folder, **settings) as llm:
        signalled(llm, signal.SIGSTOP)
        held = Asked(llm, [LONG])
        until(lambda: llm.stats().waiting)
        os.kill(own_worker(llm), signal.SIGKILL)
        until(lambda: llm.engine.core.executor.is_lost)
        assert asked(llm, [SHORT], GREEDY) == expected[1:]
        signalled(llm, signal.SIGCONT)
        assert held.wait() == expected[:1]
        assert outcomes(llm) == {"computed": 1}


def test_blocks_of_a_store_stay(folder: Path, tmp_path: Path) -> None:
    """With ``cache.store``, both processes use it, and a later engine finds the prompt there."""
    settings = {"cache.store": str(tmp_path / "store"), "cache.store_key": str(tmp_path / "key")}
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key").chmod(0o600)
    with opened(folder, **settings) as llm:
        expected = asked(llm, [LONG], GREEDY)
        assert outcomes(llm) == {"computed": 1}
    with opened(folder, **settings) as llm:
        assert asked(llm, [LONG], GREEDY) == expected
        assert outcomes(llm) == {}
        assert llm.stats().counters.restored_tokens == 18 * 16


def test_the_folder_goes_with_the_processes(folder: Path) -> None:
    """It is removed at the end, and after a kill by the next engine; that of a running one stays."""
    with opened(folder) as llm:
        cache = llm.engine.core.opgraft_config.cache
        store = Path(str(cache.store))
        assert store.stat().st_mode & 0o777 == 0o700
        killed = tempfile.mkdtemp(prefix="opgraft-handover-", dir=store.parent)
        with handover_folder(cache) as other:
            assert Path(str(other.store)).exists()
            assert store.exists()
            assert not Path(killed).exists()
        assert not Path(str(other.store)).exists()
    assert not store.exists()


def test_a_new_folder_that_another_server_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a lock looks abandoned for a moment; then the next one is taken."""
    made: list[str] = []
    make = tempfile.mkdtemp

    def make_and_lose(**options: Any) -> str:
        made.append(make(**options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    with handover_folder(OpgraftConfig().resolved().cache) as cache:
        assert cache.store == made[1]
        assert Path(made[1], "key").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.batch_invariant": False}, "have the same bits whoever computes the prompt"),
        ({"cache.prefix_reuse": False}, "[Nn]obody would look for the blocks"),
        ({"parallel.executor": "external"}, "[Tt]he second process runs on this host"),
        ({"parallel.data": 2, "parallel.expert": 2}, "share experts make steps together"),
    ],
)
def test_what_contradicts_is_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    """The start fails with the reason."""
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), **{**COMMON, "handover.tokens": LEAST, **settings})


def test_models_with_states_are_refused(tmp_path: Path) -> None:
    """A state is in no block, so the second process could not hand it over."""
    hybrid("bamba", tmp_path / "model")
    settings = {"handover.tokens": LEAST, "handover.exact": False, "max_model_len": 64}
    with pytest.raises(
        ConfigError, match=r"handover\.tokens is set, and the model has layers that"
    ):
        LLM(str(tmp_path / "model"), **{**COMMON, "model.batch_invariant": False, **settings})


def test_the_second_process_takes_the_next_devices(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enough devices, each process has its own; otherwise both have the same."""
    config = OpgraftConfig(
        model=ModelConfig(name=str(folder)),
        parallel=ParallelConfig(executor="processes", tensor=2),
        handover=HandoverConfig(tokens=1, exact=False),
    ).resolved()
    for devices, first in ((4, 2), (2, 0), (3, 0), (1, 0)):
        monkeypatch.setattr(
            type(current_platform()), "device_count", lambda _, count=devices: count
        )
        of_prefill = ProcessExecutor(config_of_prefill(config))._local_ranks()
        assert of_prefill == [(first, 2), (first + 1, 2)]
        assert ProcessExecutor(config)._local_ranks() == [(0, 2), (1, 2)]


def test_no_block_is_read_before_it_fits(folder: Path) -> None:
    """Handed over blocks are not read into a full cache, whose next request would take them."""
    settings = {"cache.num_blocks": 34, "max_model_len": 400}
    long = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    with opened(folder, **settings) as llm:
        running = Asked(llm, [OTHER], long)
        until(lambda: llm.stats().running)
        (answer,) = asked(llm, [LONG])
        assert running.wait()[0][0][2] == "length"
        counters = llm.stats().counters
        assert outcomes(llm) == {"computed": 2}
        assert counters.restored_tokens == 15 * 16 + 18 * 16 - 16
        assert counters.preemptions == 0
    with LLM(str(folder), **{**COMMON, **settings}) as plain:
        assert told(plain.generate([LONG], GREEDY)) == [answer]


def test_a_front_end_that_is_killed_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    """Both processes end with it, and the next engine removes the folder."""
    program = tmp_path / "program.py"
    values = {**COMMON, "handover.tokens": LEAST, "parallel.executor": "processes"}
    program.write_text(
        "import sys, time\n"
        "from opgraft import LLM\n"
        "if __name__ == '__main__':\n"
        f"    sys.path.insert(0, {sys.path[0]!r})\n"
        f"    llm = LLM({str(folder)!r}, **{values!r})\n"
        "    core = llm.engine.core\n"
        "    other = llm.engine.prefill.thread.engine.executor\n"
        "    pids = [e.workers.links[0].process.pid for e in (core.executor, other)]\n"
        "    print(*pids, core.opgraft_config.cache.store, flush=True)\n"
        "    time.sleep(60)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environ
    ) as started:
        assert started.stdout is not None
        *pids, store = started.stdout.readline().split()
        started.kill()
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids))
    assert Path(store).exists()
    with opened(folder) as llm:
        assert not Path(store).exists()
        assert outcomes(llm) == {}
