"""``LLM`` answers prompts and chats with the settings that it is given."""

from __future__ import annotations

import html
import logging
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from opgraft import LLM, SamplingParams
from opgraft.config import LoadConfig, OpgraftConfig
from opgraft.engine.runner.model_runner import ModelRunner
from opgraft.engine.workers.worker import DEVICE_SHARE, HOST_SHARE, Worker
from opgraft.errors import ConfigError
from opgraft.platform import DeviceMemory
from opgraft.platforms.cpu.platform import CpuPlatform
from opgraft.serving.text_engine import TextEngine
from support.engines import add
from support.small_words import word_llama

transformers = pytest.importorskip("transformers")

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"cache.num_blocks": 40, "max_model_len": 128, "load.progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_llama(tmp_path_factory.mktemp("llama"), chats=True)


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **SMALL)


def test_prompts_are_answered_as_transformers_does(llm: LLM, folder: Path) -> None:
    """Several prompts at once, as text and as token ids, give the greedy tokens of each alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in ("the cat", "a dog runs in the sun")]
    whole = [
        model.generate(torch.tensor([each]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        for each in ids
    ]
    outputs = llm.generate(["the cat", ids[1]], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [
        tokens[0, len(given) :].tolist() for tokens, given in zip(whole, ids, strict=True)
    ]
    assert outputs[0].prompt == "the cat"
    answer = outputs[0].outputs[0]
    assert answer.text == " " + tokenizer.decode(answer.token_ids), (
        "the text goes on after the prompt"
    )


def test_how_a_notebook_shows_it(llm: LLM, folder: Path) -> None:
    """The repr names the model and says what its cache holds, and so does the table for a notebook."""
    capacity = llm.engine.capacity()
    assert repr(llm) == f"<LLM {str(folder)!r}: {capacity}>"
    shown = llm._repr_html_()
    platform = opgraft.current_platform().name
    assert all(html.escape(text) in shown for text in (str(folder), platform, capacity))


def test_a_chat_is_put_into_the_template(llm: LLM) -> None:
    """The prompt of a chat is what the checkpoint's template makes of it."""
    (output,) = llm.chat([{"role": "user", "content": "the cat"}], GREEDY)
    assert output.prompt == "user the cat "
    assert llm.chats


def test_answers_grow_and_end(llm: LLM) -> None:
    """Each news of an answer has more of it; if the iterator is closed, the request is aborted, and blocks are free."""
    pool, inputs = llm.engine.core.cache.pool, llm.engine.inputs
    (whole,) = llm.generate("the cat", GREEDY)
    request = inputs.prepare("a", "the cat", GREEDY)
    seen = list(llm.answers([request], grows=True))
    assert [len(each.outputs[0].token_ids) for each in seen] == [1, 2, 3, 4, 5, 6]
    assert request.output.outputs == seen[-1].outputs == whole.outputs
    left = inputs.prepare("b", "the cat", SamplingParams(max_tokens=100, ignore_eos=True))
    news = llm.answers([left], grows=True)
    next(news)
    news.close()
    assert left.output.outputs[0].finish_reason == "abort"
    assert pool.num_free == pool.num_blocks
    assert len(llm.generate("the cat", GREEDY)[0].outputs[0].token_ids) == 6


def test_logprobs_grow_in_place(llm: LLM) -> None:
    """A token adds to the list of log-probabilities, whatever its length; a snapshot keeps what it had."""
    engine = TextEngine(llm.engine.core.opgraft_config)  # a thread computes the steps of the other
    output = add(
        engine,
        "a",
        "the cat",
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1),
    )
    lists, snapshots = [], []
    while engine.has_work:
        engine.step()
        lists.append(output.outputs[0].logprobs)
        snapshots.append(output.snapshot())
    assert all(
        each is lists[0] for each in lists[:-1]
    )  # the last is that of the answer that has ended
    assert [len(snapshot.outputs[0].logprobs) for snapshot in snapshots] == [1, 2, 3, 4, 5, 6]


def test_settings_are_honoured(folder: Path) -> None:
    """Settings of cache, scheduler and seed reach the engine, from a scope and as arguments, which go first."""
    scope = OpgraftConfig()
    with opgraft.set_config(scope):
        llm = LLM(
            str(folder), **SMALL, block_size=8, max_num_seqs=3, seed=7, enable_prefix_caching=False
        )
    core = llm.engine.core
    assert (core.cache.block_size, core.cache.pool.num_blocks, core.cache.prefix_reuse) == (
        8,
        40,
        False,
    )
    assert core.scheduler.config.max_num_seqs == 3
    assert core.opgraft_config.model.seed == 7
    with pytest.raises(ConfigError, match="LLM has no argument 'max_num_seq'"):
        LLM(str(folder), max_num_seq=3)


def test_the_seed_decides_what_is_sampled(folder: Path) -> None:
    """Engines of one seed sample the same, of another seed something else."""
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    found = [LLM(str(folder), **SMALL, seed=seed).generate("the cat", params) for seed in (1, 1, 2)]
    first, again, other = (output.outputs[0].token_ids for (output,) in found)
    assert first == again != other


@pytest.mark.parametrize(
    ("chain", "setting", "share"),
    [
        (("cpu", "native"), {}, HOST_SHARE),
        (("native",), {}, DEVICE_SHARE),
        (("cpu",), {"cache.memory_share": 0.5}, 0.5),
    ],
)
def test_the_cache_takes_a_share_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, chain: tuple[str, ...], setting: dict[str, Any], share: float
) -> None:
    """A quarter of a host's memory, nearly all of a device's, or what is set."""
    monkeypatch.setattr(CpuPlatform, "dispatch_chain", chain)
    monkeypatch.setattr(CpuPlatform, "runs_cpu_kernels", False)
    monkeypatch.setattr(CpuPlatform, "memory", lambda self, index=0: DeviceMemory(2000, 1000))
    monkeypatch.setattr(ModelRunner, "bound_of_largest_step", lambda self: 100)
    worker = Worker(opgraft.config.whole.config_from_fields(setting).resolved())
    worker.init_device()
    assert worker.cache_bytes() == 1000 * share - (100 if share == DEVICE_SHARE else 0)


def platform_of(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the platform's devices be of a type, with 1000 bytes free on the first and 2000 on the second."""
    monkeypatch.setattr(CpuPlatform, "device_type", device_type)
    monkeypatch.setattr(CpuPlatform, "dispatch_chain", ("native",))
    monkeypatch.setattr(
        CpuPlatform, "memory", lambda self, index=0: DeviceMemory(9000, 1000 * (index + 1))
    )
    monkeypatch.setattr(ModelRunner, "bound_of_largest_step", lambda self: 0)
    monkeypatch.setattr("opgraft.engine.runner.memory_query.host_memory", lambda: (9000, 400))


@pytest.mark.parametrize(
    ("device", "expected"), [(None, 900), ("xpu", 900), ("xpu:1", 1800), ("cpu", 100)]
)
def test_the_memory_is_that_of_the_device(
    device: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache takes its share of what is free where the model is: on one of the devices, or on the host."""
    platform_of("xpu", monkeypatch)
    worker = Worker(OpgraftConfig(load=LoadConfig(device=device)).resolved())
    worker.init_device()
    assert worker.cache_bytes() == expected


def test_memory_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of another kind than the platform's has no known memory: the error says what to set."""
    platform_of("xpu", monkeypatch)
    worker = Worker(OpgraftConfig(load=LoadConfig(device="meta")).resolved())
    worker.init_device()
    with pytest.raises(ConfigError, match=r"load\.device=meta is not known.* for xpu: set cache"):
        worker.cache_bytes()


def test_what_the_cache_holds_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the level info, in tokens."""
    with caplog.at_level(logging.INFO, "opgraft"):
        LLM(str(folder), **SMALL)
    assert (
        "the cache holds 1,280 tokens in 40 blocks of 32; the longest context has 128"
        in caplog.text
    )
