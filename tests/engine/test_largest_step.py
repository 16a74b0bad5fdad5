"""A device's cache leaves the room that the largest step takes."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import LLM, DeviceMemory, SamplingParams, current_platform, functional
from opgraft.engine.runner.largest_step import largest_step
from opgraft.engine.workers.worker import DEVICE_SHARE
from opgraft.errors import ConfigError
from opgraft.ops.attention import paged
from support.engines import prompts
from support.quantized_files import write_layers
from support.quantized_formats import FORMATS
from support.random_decoders import DECODERS, written
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

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
    gc.collect()
    gc.freeze()  # what there is now is not looked at: it would take a second each time
    yield lambda **settings: LLM(
        str(tmp_path / "model"), dtype="float32", **{"load.progress": False, **settings}
    )
    # Not gc.unfreeze(): later collections would look at all that pytest and torch hold.
    gc.collect()


def test_the_cache_leaves_room_for_the_largest_step(open_llm: Callable[..., LLM]) -> None:
    """A larger step that is tried makes the cache smaller. The rest of the memory stays free, tried or not."""
    sizes, free = {}, []
    for tokens in (64, 1024, 4096):
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
    assert 0 < sizes[4096] < sizes[1024]


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


def peak(run: Callable[[], object]) -> int:
    """Return the most bytes that are allocated at a time while something runs, within operations too."""
    with sdpa_kernel(SDPBackend.MATH), profile(profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


def quantized_head(folder: Path) -> None:
    """A Llama whose largest matrix is its head, which is quantized."""
    sizes = {"vocab_size": 4096, "hidden_size": 512, "head_dim": 8}
    llama = written("Llama", folder / "plain", **sizes, max_position_embeddings=512)
    settings, quantize = FORMATS["gptq"]
    heads = {"lm_head.weight": quantize}
    write_layers(
        folder / "model", folder / "plain", llama, {**settings, "lm_head": True}, heads.get
    )


def plain(family: str, **values: Any) -> Callable[[Path], None]:
    return lambda folder: written(family, folder / "model", **values)  # type: ignore[return-value]


SMALL = {"max_position_embeddings": 512, "hidden_size": 32, "intermediate_size": 32}
GPT_OSS = {**DECODERS["gpt_oss"][1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
LATENT = dict(DECODERS["deepseek v3, with experts"][1])
DRAFTS = {
    "speculation.method": "ngram",
    "speculation.exact": False,
    "speculation.adaptive": False,
}
PEAKS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "a long context": (plain("Llama", **SMALL), {}),
    "many heads": (plain("Llama", **{**SMALL, "num_attention_heads": 16, "head_dim": 4}), {}),
    "a cap": (plain("Gemma2", **{**SMALL, "head_dim": 8}), {}),
    "a cap and codes": (plain("Gemma2", **{**SMALL, "head_dim": 8}), {"cache.dtype": "int8"}),
    "sinks": (plain("GptOss", **{**GPT_OSS, "max_position_embeddings": 512}), {}),
    "latents": (plain("DeepseekV3", **{**LATENT, "max_position_embeddings": 512}), {}),
    "a quantized head": (quantized_head, {}),
    "drafts": (plain("Llama", **{**SMALL, "vocab_size": 4096}), DRAFTS),
}


@pytest.mark.parametrize("name", PEAKS)
def test_no_step_takes_more_than_the_bound(
    name: str, open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Parts of long prompts, whose beginnings are in the cache, and single tokens stay below the bound."""
    shutil.rmtree(tmp_path / "model")
    write, given = PEAKS[name]
    write(tmp_path)
    sizes = {"max_num_batched_tokens": 96, "max_num_seqs": 8, "max_model_len": 512}
    llm = open_llm(**sizes, **given, **{"cache.num_blocks": 300, "parallel.executor": "in_process"})
    runner = llm.engine.core.executor.worker.runner
    params = SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, seed=0, ignore_eos=True)
    most = peak(lambda: llm.generate(prompts(500, *[8] * 7), params))
    assert 0 < most < runner.bound_of_largest_step()


def test_drafts_take_memory(open_llm: Callable[..., LLM]) -> None:
    """Bound and trial count the logits of drafted tokens, which are not sorted all at once."""
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "cache.num_blocks": 64}
    bounds, peaks = [], []
    for given in ({}, {**DRAFTS, "speculation.max_tokens": 6}):
        llm = open_llm(**sizes, **given, **{"parallel.executor": "in_process"})
        runner = llm.engine.core.executor.worker.runner
        bounds.append(runner.bound_of_largest_step())
        peaks.append(runner.peak_of_largest_step(lambda: -live_bytes()))
    copies_of_logits = 4 * runner.vocab_size * 4
    assert bounds[1] - bounds[0] == 4 * 6 * copies_of_logits
    assert peaks[1] - peaks[0] == pytest.approx(4 * 6 * copies_of_logits, rel=0.1)


def test_contexts_are_gathered_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single tokens of many sequences are computed in parts, with the results of all at once."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(24, 2, 2, 4, 8, generator=generator)
    query = torch.randn(6, 4, 8, generator=generator)
    table = torch.randperm(24, generator=generator).view(6, 4)
    lengths = torch.tensor([1, 16, 7, 3, 9, 12])
    given = (query, cache, table, torch.arange(7), lengths, 0.3)
    whole = functional.paged_attention.native(*given)
    most = {}
    for at_once in (1, 40, 1000):
        monkeypatch.setattr(paged, "GATHERED_AT_ONCE", at_once)
        torch.testing.assert_close(functional.paged_attention.native(*given), whole)
        most[at_once] = peak(lambda: functional.paged_attention.native(*given))
    assert most[1] < most[40] < most[1000] / 2


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
    llm = open_llm(max_model_len=64)  # which ends its engine when nobody has it
    runner = llm.engine.core.executor.worker.runner
    assert len(runner.batch) == len(runner.sampling._all) == 0
    assert not any(module._forward_hooks for module in runner.model.modules())


def test_a_largest_step_that_fails(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without memory for it is an error with the limits that make it smaller."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("opgraft.engine.runner.model_runner.ModelRunner._sample", full)
    reason = (
        "the largest step, of 2048 tokens and 256 sequences, fails on cpu: "
        "OutOfMemoryError: no room. Lower scheduler"
    )
    with pytest.raises(ConfigError, match=reason):
        open_llm(max_model_len=64, max_num_batched_tokens=2048, max_num_seqs=256)
