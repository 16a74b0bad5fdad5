"""A device's cache leaves the room that the largest step takes."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.engines import prompts
from opgraft import LLM, DeviceMemory, SamplingParams, current_platform
from opgraft.engine.largest_step import largest_step
from opgraft.engine.worker import DEVICE_SHARE
from opgraft.errors import ConfigError
from random_decoders import DECODERS, written

MEMORY = 40 << 20


@pytest.mark.parametrize(
    ("seqs", "tokens", "longest", "lengths"),
    [
        (4, 64, 100, [61, 1, 1, 1]),
        (4, 64, 20, [20, 20, 20, 4]),
        (4, 100, 9, [9, 9, 9, 9]),
        (9, 3, 100, [1, 1, 1]),
    ],
)
def test_the_largest_step(seqs: int, tokens: int, longest: int, lengths: list[int]) -> None:
    """As many sequences and tokens as a step may have, the first as long as may be, with blocks of their own."""
    step = largest_step(seqs, tokens, longest, 4, 2)
    assert [each.count for each in step.sequences] == lengths
    assert all(each.samples for each in step.sequences)
    blocks = [block for new in step.added for kind in new.blocks for block in kind]
    assert sorted(blocks) == list(range(2 * sum(-(-length // 4) for length in lengths)))


def live_bytes() -> int:
    """Bytes of the tensors made since ``gc.freeze``, as the memory of a simulated device that holds nothing else."""
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum(
        {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors
        }.values()
    )


@pytest.fixture
def open_llm(
    toy_npu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LLM]]:
    """Makes an ``LLM`` on the toy NPU, whose free memory is what tensors leave of it."""
    written("Llama", tmp_path / "model", max_position_embeddings=512)
    platform = current_platform()
    assert platform.name == "toy_npu"
    monkeypatch.setattr(
        type(platform), "memory", lambda self, index=0: DeviceMemory(MEMORY, MEMORY - live_bytes())
    )
    gc.freeze()  # what there is now is not looked at: it would take a second each time
    yield lambda **settings: LLM(
        str(tmp_path / "model"), dtype="float32", **{"load.progress": False, **settings}
    )
    gc.unfreeze()


def test_the_cache_leaves_room_for_the_largest_step(open_llm: Callable[..., LLM]) -> None:
    """With a larger step the cache is smaller; requests that fill it and the step leave the rest of the memory free."""
    sizes, free = {}, []
    for tokens in (64, 1024):
        llm = open_llm(max_num_batched_tokens=tokens, max_num_seqs=8, max_model_len=512)
        sizes[tokens] = (
            llm.engine.core.cache.pool.num_blocks
            * llm.engine.core.executor.worker.runner.layout.bytes_per_block
        )
        for module in llm.engine.core.executor.worker.runner.model.modules():
            module.register_forward_hook(lambda *_: free.append(current_platform().memory().free))
        params = SamplingParams(max_tokens=2, top_p=0.9, ignore_eos=True)
        llm.generate(prompts(*[128] * 8), params)
        assert 0 < (1 - DEVICE_SHARE) * MEMORY - 0.02 * MEMORY < min(free)
        llm.shutdown()
    assert 0 < sizes[1024] < sizes[64]


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "mixtral", "gpt_oss", "deepseek v3, with experts"]
)
def test_the_bound_is_above_what_a_step_takes(
    name: str, open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """The bound of a step is more than the memory that the computed step takes, for few and for many tokens."""
    shutil.rmtree(tmp_path / "model")
    family, values = DECODERS[name]
    written(family, tmp_path / "model", **values)
    for tokens in (64, 512):
        sizes = {"max_num_batched_tokens": tokens, "max_num_seqs": 8}
        llm = open_llm(**sizes, **{"cache.num_blocks": 64})
        runner = llm.engine.core.executor.worker.runner
        bound, calls = runner.bound_of_largest_step(), list[int]()
        peak = runner.peak_of_largest_step(lambda: -live_bytes(), partial(calls.append, 1))
        assert 0 < peak < bound, (peak, bound)
        assert 0 < len(calls) < 2 * runner.calls_of_largest_step()


@pytest.mark.parametrize("tokens", [16, 4096])
def test_a_step_is_tried_if_it_may_take_much(
    tokens: int, open_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    """Below half of the memory, the bound does for a step that nobody computes. A trial says that it goes on."""
    with caplog.at_level(logging.INFO, "opgraft"):
        open_llm(
            max_num_batched_tokens=tokens,
            max_num_seqs=8,
            max_model_len=64,
            **{"load.progress": True},
        ).shutdown()
    said = " ".join(caplog.messages)
    assert ("trial step of 4,096 tokens on cpu" in said) == (tokens == 4096)
    assert ("the largest step takes less than" in said) == (tokens == 16)


def test_what_the_largest_step_leaves_behind(open_llm: Callable[..., LLM]) -> None:
    """Nothing: the runner knows no sequence, and the cache is the engine's."""
    runner = open_llm(max_model_len=64).engine.core.executor.worker.runner
    assert len(runner.batch) == len(runner.sampling._all) == 0
    assert not any(module._forward_hooks for module in runner.model.modules())


def test_a_largest_step_that_fails(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without memory for it is an error with the limits that make it smaller."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("opgraft.engine.model_runner.ModelRunner._sample", full)
    reason = (
        "the largest step, of 2048 tokens and 256 sequences, fails on cpu: "
        "OutOfMemoryError: no room. Lower scheduler"
    )
    with pytest.raises(ConfigError, match=reason):
        open_llm(max_model_len=64, max_num_batched_tokens=2048, max_num_seqs=256)
