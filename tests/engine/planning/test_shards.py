"""What a plan says of a rank is what the loader and the collectives of real ranks do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opgraft.config import OpgraftConfig
from opgraft.distributed.groups import parallelism
from opgraft.distributed.layout import ParallelLayout
from opgraft.engine.core import EngineCore
from opgraft.engine.planning.shard import Shard
from opgraft.models.decoder import DecoderAttention
from opgraft.ops import Attention
from support.engines import prompts, recorded, replaced, settings
from support.random_decoders import (
    DEEPSEEK_EXPERTS,
    LATENT,
    ROUTED,
    hybrid,
    through_transformers,
    written,
)
from support.ranks import Ranks

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
)
ROWS = 3
TENSORS = ParallelLayout(2)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("Llama", {}),
    "one key head, tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "norms over all heads": ("Olmo2", {}),
    "windows, sinks, experts": ("GptOss", {**ROUTED, "sliding_window": 5}),
    "latent, experts": ("DeepseekV3", {**LATENT, **DEEPSEEK_EXPERTS, "q_lora_rank": 20}),
    "attention and states": ("bamba", {}),
    "states alone": ("mamba", {}),
    "of transformers": ("smollm3", {}),
}
SHARED = {"num_local_experts": 6, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def stages() -> Iterator[Ranks]:
    with Ranks(2, pipeline=2) as ranks:
        yield ranks


def saved(name: str, folder: Path) -> Path:
    family, values = MODELS[name]
    if family == "smollm3":
        through_transformers(family, folder)
    elif family.islower():
        hybrid(family, folder, **values)
    else:
        written(family, folder, **values)
    return folder


def counted() -> list[tuple[str, str, int]]:
    """A list that fills with the collectives that this rank takes part in."""
    made: list[tuple[str, str, int]] = []

    def counting(communicator: Any, operation: str) -> Any:
        call = getattr(communicator, operation)

        def run(x: Any, *args: Any, **named: Any) -> Any:
            out = call(x, *args, **named)
            made.append((communicator.name, operation, (out if operation == "recv" else x).nbytes))
            return out

        return run

    for group in parallelism().groups.values():
        for operation in OPERATIONS if group.communicator else ():
            setattr(group.communicator, operation, counting(group.communicator, operation))
    return made


def real(config: OpgraftConfig) -> tuple[int, int, int, list[tuple[str, str, int]]]:
    """Bytes of weights, of a block and of a state of this rank, and the collectives of a step of ``ROWS`` tokens."""
    core = EngineCore(config)
    runner = core.executor.worker.runner
    weights = sum(tensor.nbytes for tensor in (*runner.model.parameters(), *runner.model.buffers()))
    core.add([recorded(f"r{row}", prompt, 4)[0] for row, prompt in enumerate(prompts(*[5] * ROWS))])
    core.step()
    made = counted()
    core.step()
    for group in parallelism().groups.values():
        for operation in OPERATIONS if group.communicator else ():
            delattr(group.communicator, operation)
    return weights, runner.layout.bytes_per_block, runner.layout.bytes_per_state, made


def planned(
    config: OpgraftConfig, rank: int, layout: ParallelLayout = TENSORS
) -> tuple[int, int, int, list[tuple[str, str, int]]]:
    shard = Shard(config.resolved(), layout, rank)
    transfers = [tuple(each) for each in shard.step(ROWS, 8).transfers]
    return shard.weight_bytes, shard.cache.bytes_per_block, shard.cache.bytes_per_state, transfers


@pytest.mark.parametrize("name", MODELS)
def test_a_shard_is_that_of_a_real_rank(name: str, tmp_path: Path, two: Ranks) -> None:
    """Weights and cache of each rank, and every collective of a step, are those of the plan to the byte."""
    config = settings(saved(name, tmp_path / "model"))
    found = two.run(real, config)
    for rank, there in enumerate(found):
        assert planned(config, rank) == there
        assert there[-1]


def test_experts_that_ranks_share(tmp_path: Path, two: Ranks) -> None:
    """The same where each rank has some of the experts, and with a place more than there are experts."""
    written("Mixtral", tmp_path, **SHARED)
    config = replaced(settings(tmp_path), parallel={"expert": 2, "redundant_experts": 2})
    found = two.run(real, config)
    for rank, there in enumerate(found):
        assert planned(config, rank) == there


@pytest.mark.parametrize("name", ["one key head, tied", "latent, experts", "attention and states"])
def test_stages(name: str, tmp_path: Path, stages: Ranks) -> None:
    """The same for the stages of a pipeline: each has its layers, and sends as many bytes as it says."""
    config = replaced(settings(saved(name, tmp_path / "model")), parallel={"pipeline": 2})
    for rank, there in enumerate(stages.run(real, config)):
        assert planned(config, rank, ParallelLayout(1, 2)) == there


@pytest.mark.parametrize(("name", "heads"), [("grouped heads", 2), ("latent, experts", 4)])
def test_attention_computes_for_each_query_head(name: str, heads: int, tmp_path: Path) -> None:
    """What is read of the cache is multiplied for all query heads that share it, as the layer says."""
    shard = Shard(settings(saved(name, tmp_path)).resolved(), ParallelLayout(), 0)
    assert {layer.num_queries_per_kv for layer in shard.cache.layers.values()} == {heads}
    done = shard.step(ROWS, 8).cache
    assert done.flops == 2 * heads * done.nbytes / shard.cache.dtype.itemsize


def test_a_replacement_says_how_many_query_heads_share_its_cache(tmp_path: Path) -> None:
    """A plan counts by what the layer in use says, whatever else that calls its heads."""

    @Attention.register_oot(name=Attention)
    class Counting(Attention):
        @property
        def num_queries_per_kv(self) -> int:
            return 7

    shard = Shard(settings(saved("grouped heads", tmp_path)).resolved(), ParallelLayout(), 0)
    done = shard.step(ROWS, 8).cache
    assert done.flops == 2 * 7 * done.nbytes / shard.cache.dtype.itemsize


def test_a_config_is_enough(tmp_path: Path) -> None:
    """Without weights the plan is the same, and the groups of this process are as they were."""
    config = settings(saved("grouped heads", tmp_path))
    whole = planned(config, 0)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    alone = parallelism()
    assert planned(config, 0) == whole
    assert parallelism() is alone


def test_layers_that_are_alike_are_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six layers two are run, the first and one that has a residual stream, and the sums of all are counted."""
    written("Llama", tmp_path, num_hidden_layers=6)
    calls, forward = [], DecoderAttention.forward
    monkeypatch.setattr(
        DecoderAttention,
        "forward",
        lambda self, *given: calls.append(self) or forward(self, *given),
    )
    shard = Shard(settings(tmp_path).resolved(), TENSORS, 0)
    for _ in range(2):
        operations = [each.operation for each in shard.step(ROWS, 8).transfers]
        assert operations[:-1] == ["all_reduce"] * 13
    assert len(calls) == 4
