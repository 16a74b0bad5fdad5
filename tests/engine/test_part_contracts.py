"""The contracts of single parts of the engine: opgraft's own keep them, and each wrong one is told from a right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.engine.runner.memory_query import MemoryQuery
from opgraft.engine.runner.model_runner import ModelRunner
from opgraft.engine.runner.step_program import StepGraph
from opgraft.engine.sampling import Sampler
from opgraft.engine.step import StepResult
from opgraft.engine.workers.executor import Executor
from opgraft.engine.workers.executors import executor_of
from opgraft.engine.workers.in_process_executor import InProcessExecutor
from opgraft.engine.workers.worker import Worker
from opgraft.testing.part_contracts import (
    check_executor,
    check_memory_query,
    check_model_runner,
    check_sampler,
    check_step_graph,
    check_worker,
)
from support.engines import engine, replaced, settings
from support.random_decoders import hybrid, written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts") / "gemma"
    written("Gemma2", folder, head_dim=16, sliding_window=5, query_pre_attn_scalar=24)
    return folder


@pytest.fixture
def given(folder: Path) -> OpgraftConfig:
    return settings(folder)


@pytest.fixture
def use() -> Iterator[Callable[[str, type], None]]:
    """Puts a class in the place of another one, by name, until the test ends."""
    used: list[type] = []

    def use(name: str, cls: type) -> None:
        PluggableClass.register_oot(cls, name=name)
        used.append(cls)

    yield use
    for cls in used:
        PluggableClass.unregister_oot(cls)


def test_own_parts_keep_their_contracts(given: OpgraftConfig, tmp_path: Path) -> None:
    """Over layers with windows and without, and over states."""
    check_sampler()
    check_step_graph()
    check_memory_query(MemoryQuery(torch.device("cpu")))
    check_executor(given)
    check_worker(replaced(given, cache={"num_blocks": None}))
    tokens = check_model_runner(given, check_model_runner(given))
    with pytest.raises(AssertionError, match="tokens are"):
        check_model_runner(given, {**tokens, "short": [1, 2, 3]})
    hybrid("bamba", tmp_path)
    check_model_runner(settings(tmp_path))


def test_parts_on_the_toy_npu_keep_their_contracts(given: OpgraftConfig, toy_npu: Path) -> None:
    """Over its own layout of the cache; its memory is that of the device file, and never shrinks."""
    check_sampler()
    check_model_runner(given)
    check_worker(replaced(given, cache={"num_blocks": None}))
    with pytest.raises(AssertionError, match="were taken"):
        check_memory_query(MemoryQuery(torch.device("cpu")))


def test_parts_of_the_engine_have_the_whole_config(folder: Path, given: OpgraftConfig) -> None:
    """Worker, runner, sampler, scheduler and cache manager hold every setting, with the built-in defaults."""
    worker = Worker(OpgraftConfig())
    worker.init_device()
    assert worker.opgraft_config == OpgraftConfig().resolved()
    assert worker.runner.sampler.opgraft_config is worker.runner.opgraft_config
    assert Sampler().opgraft_config.cache.block_size == 32
    core: Any = engine(folder)
    try:
        parts = core.scheduler, core.cache, core.executor.worker.runner.sampler
        assert {part.opgraft_config.model.name for part in parts} == {given.model.name}
        assert core.scheduler.config == given.resolved().scheduler
    finally:
        core.shutdown()


class Likeliest(Sampler):
    def __call__(self, logits: Any, batch: Any) -> Any:
        found = super().__call__(logits, batch)
        return replace(found, tokens=logits.argmax(-1))


class Writing(Sampler):
    def __call__(self, logits: Any, batch: Any) -> Any:
        found = super().__call__(logits, batch)
        logits.zero_()
        return found


class Unseeded(Sampler):
    def __call__(self, logits: Any, batch: Any) -> Any:
        found = super().__call__(logits, batch)
        drawn = [
            row
            for row, each in enumerate(batch.rows)
            if each.params.temperature and each.params.top_k < 1
        ]
        if not drawn:
            return found
        tokens = found.tokens.clone()
        tokens[drawn] = (logits[drawn] / 0.7).softmax(-1).multinomial(1).squeeze(-1)
        return replace(found, tokens=tokens)


class Unfiltered(Sampler):
    def __call__(self, logits: Any, batch: Any) -> Any:
        found = super().__call__(logits, batch)
        drawn = [row for row, each in enumerate(batch.rows) if each.params.top_k > 0]
        tokens = found.tokens.clone()
        tokens[drawn] = torch.arange(len(drawn)) % logits.shape[1]
        return replace(found, tokens=tokens)


class Harmed(Sampler):
    def __call__(self, logits: Any, batch: Any) -> Any:
        found = super().__call__(logits, batch)
        return replace(found, tokens=torch.full_like(found.tokens, -1)) if found.errors else found


SAMPLERS = {
    Likeliest: "logit_bias did not change",
    Writing: "wrote to the logits",
    Unseeded: "other tokens beside others than alone",
    Unfiltered: "top_k=2 let the tokens",
    Harmed: "to harm no other",
}


@pytest.mark.parametrize("kind", SAMPLERS, ids=lambda kind: kind.__name__)
def test_wrong_samplers(kind: type[Sampler]) -> None:
    with pytest.raises(AssertionError, match=SAMPLERS[kind]):
        check_sampler(kind)


class NoCopies(ModelRunner):
    def _copy_blocks(self, copies: Any) -> None:
        pass


class AlwaysSampling(ModelRunner):
    def execute(self, step: Any) -> StepResult:
        result = super().execute(step)
        return replace(
            result, tokens={each.request_id: 7 for each in step.sequences} | dict(result.tokens)
        )


class Blind(ModelRunner):
    """Sees of each chunk what stands in it, and nothing before."""

    def _compute(self, sequences: Any, started: float, *, continues: bool) -> StepResult:
        chunks = [each._replace(start=0) if each.count > 1 else each for each in sequences]
        return super()._compute(chunks, started, continues=continues)


RUNNERS = {
    NoCopies: "behind a prefix that was copied",
    AlwaysSampling: "the step samples",
    Blind: "prompts in chunks beside each other",
}


@pytest.mark.parametrize("kind", RUNNERS, ids=lambda kind: kind.__name__)
def test_wrong_runners(
    kind: type[ModelRunner], given: OpgraftConfig, use: Callable[[str, type], None]
) -> None:
    use("model_runner", kind)
    with pytest.raises(AssertionError, match=RUNNERS[kind]):
        check_model_runner(given)


class Megabytes(Worker):
    def cache_bytes(self) -> Any:
        return super().cache_bytes() / 2**20


class Trusting(Worker):
    def expect_memory(self, num_blocks: int, num_states: int) -> None:
        pass


WORKERS = {Megabytes: "cache_bytes returned", Trusting: "expect_memory took"}


@pytest.mark.parametrize("kind", WORKERS, ids=lambda kind: kind.__name__)
def test_wrong_workers(
    kind: type[Worker], given: OpgraftConfig, use: Callable[[str, type], None]
) -> None:
    use("worker", kind)
    with pytest.raises(AssertionError, match=WORKERS[kind]):
        check_worker(given)


class Recorded(StepGraph):
    """Returns what its first call did."""

    def __call__(self, inputs: Any, *caches: Any) -> Any:
        self.first = getattr(self, "first", None) or super().__call__(inputs, *caches)
        return self.first


class InPlace(StepGraph):
    """Returns the same memory each time."""

    def __call__(self, inputs: Any, *caches: Any) -> Any:
        found = super().__call__(inputs, *caches)
        if not hasattr(self, "kept"):
            self.kept = found
        for kept, each in zip(self.kept, found, strict=True):
            kept.copy_(each)
        return self.kept


@pytest.mark.parametrize("kind", [Recorded, InPlace], ids=lambda kind: kind.__name__)
def test_wrong_graphs(kind: type[StepGraph]) -> None:
    with pytest.raises(AssertionError, match="returned other numbers"):
        check_step_graph(kind)


class Constant(MemoryQuery):
    def free(self) -> int | None:
        return 1 << 30


class Unknown(MemoryQuery):
    def free(self) -> int | None:
        return None


@pytest.mark.parametrize(
    ("kind", "match"), [(Constant, "were taken"), (Unknown, "free returned None")]
)
def test_wrong_memory_queries(kind: type[MemoryQuery], match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        check_memory_query(kind(torch.device("cpu")))


class Deaf(InProcessExecutor):
    """Answers for ever."""

    def call(self, method: str, *args: Any) -> Any:
        return None

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return [None]


def test_a_wrong_executor(given: OpgraftConfig, use: Callable[[str, type], None]) -> None:
    use("executor", Deaf)
    with pytest.raises(AssertionError, match="a call after the shutdown was made"):
        check_executor(given)


def test_an_executor_that_lacks_a_part_is_refused(
    given: OpgraftConfig, use: Callable[[str, type], None]
) -> None:
    """It is not taken for the one of this process: the error names what is missing."""

    class Half(Executor):
        def start(self) -> None:
            pass

    use("executor", Half)
    with pytest.raises(TypeError, match=r"abstract.*Half.*result"):
        executor_of(given.resolved())


def test_memory_and_graphs_are_replaced_by_name(
    folder: Path, use: Callable[[str, type], None]
) -> None:
    """A worker sizes its cache by the memory query of a plugin, and tells whose it is."""
    use("memory_query", Constant)
    core = engine(folder, num_blocks=None)
    share = (1 << 30) // 4
    bytes_per_block = core.executor.worker.runner.layout.bytes_per_block
    assert core.cache.pool.num_blocks == share // bytes_per_block
    assert (
        next(row.cls for row in core.explain().classes if row.name == "memory_query") == "Constant"
    )
