"""A runner whose programs have fixed shapes gives the tokens of the runner that computes step by step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.runner.bucketed_runner import BucketedModelRunner
from opgraft.engine.runner.step_program import StepGraph, exported
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import ConfigError
from opgraft.ops.attention import Attention
from opgraft.ops.attention.padded import PaddedAttention
from support.engines import (
    copies_of,
    engine,
    expect_empty,
    news,
    prompts,
    replaced,
    serve,
    settings,
)
from support.random_decoders import DECODERS, hybrid, written
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 40}


@pytest.fixture
def fixed_shapes(fresh_host: None) -> Iterator[None]:
    """The runner and the attention of devices that need a program for each shape, on the CPU."""
    CustomOp.register_oot(PaddedAttention, name=Attention)
    PluggableClass.register_oot(BucketedModelRunner, name="model_runner")
    yield
    CustomOp.unregister_oot(PaddedAttention)
    PluggableClass.unregister_oot(BucketedModelRunner)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucketed") / "llama"
    written("Llama", folder, num_hidden_layers=1)
    return folder


def fixed(folder: Path, **sections: dict[str, Any]) -> OpgraftConfig:
    compilation = {"mode": 1, "backend": "eager", "fail_on_recompile": True, "custom_ops": ("all",)}
    sections["compilation_config"] = {**compilation, **sections.get("compilation_config", {})}
    return replaced(settings(folder, **LIMITS), **sections)


def requests() -> list[Request]:
    """Prompts of one token to several chunks, siblings, and every kind of sampling."""
    greedy = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    made = [
        Request(f"r{i}", p, SamplingParams(**greedy)) for i, p in enumerate(prompts(19, 3, 1, 41))
    ]
    drawn = SamplingParams(
        temperature=0.8, top_p=0.9, seed=5, max_tokens=5, ignore_eos=True, logprobs=2
    )
    biased = SamplingParams(**greedy, logit_bias={7: 3.0})
    siblings = Request(
        "n", prompts(6)[0], SamplingParams(n=2, seed=3, max_tokens=4, ignore_eos=True)
    ).split()
    return [
        *made,
        Request("drawn", prompts(12)[0], drawn),
        Request("biased", prompts(9)[0], biased),
        *siblings,
    ]


def tokens(core: EngineCore) -> dict[str, list[int]]:
    asked = requests()
    serve(core, asked)
    return {each.request_id: each.output for each in asked}


FAMILIES = [("llama", 1), pytest.param("gpt_oss", 2, marks=pytest.mark.slow)]
"""Plain; two tables, windows, sinks and experts. How many layers have one of each."""


@pytest.mark.parametrize(("family", "layers"), FAMILIES)
def test_the_tokens_are_those_of_any_shape(
    family: str,
    layers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Prompts in chunks, batches and siblings run in few programs, and nothing is compiled while they do."""
    name, values = DECODERS[family]
    written(name, tmp_path, **{**values, "num_hidden_layers": layers})
    expected = tokens(engine(tmp_path, **LIMITS))
    request.getfixturevalue("fixed_shapes")
    # A budget of 8 tokens spares a program, and test_limits_give_the_shapes has larger ones.
    core = EngineCore(fixed(tmp_path, scheduler={"max_num_batched_tokens": 8}))
    runner, copies = core.executor.worker.runner, copies_of(core, monkeypatch)
    assert [str(shape) for shape in runner.programs] == ["8 sequences", "a prompt of 8 tokens"]
    with torch.compiler.set_stance("fail_on_recompile"):
        assert tokens(core) == expected
    assert copies
    (row,) = [row for row in core.explain().classes if row.name == "model_runner"]
    assert row.remark == "2 shapes are compiled by eager"


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]], str]] = {
    "invariance": (
        "Llama",
        {},
        {"model": {"batch_invariant": True}, "compilation_config": {"mode": 0}},
        "model.batch_invariant",
    ),
    "drafts": (
        "Llama",
        {},
        {"speculation": {"method": "ngram", "exact": False}},
        "speculation.method is set, and a program has the logits of a sequence's last token alone",
    ),
    "a latent cache": (
        *DECODERS["deepseek v2"],
        {},
        r"layers.0.self_attn.attn' does not take padded batches",
    ),
    "no such backend": (
        "Llama",
        {},
        {"compilation_config": {"backend": "none_such"}},
        "Set another compilation_config",
    ),
    "a fitted rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {},
        "ropes that depend on the length of the context",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_program(fixed_shapes: None, what: str, tmp_path: Path) -> None:
    """The start of the engine says what does not go with programs of fixed shapes."""
    family, values, sections, message = REFUSED[what]
    written(family, tmp_path, **{**values, "num_hidden_layers": 1})
    with pytest.raises(ConfigError, match=message):
        EngineCore(fixed(tmp_path, **sections))


def test_states_have_no_program(fixed_shapes: None, tmp_path: Path) -> None:
    """A model whose layers keep a state of each sequence is refused by the name of one."""
    hybrid("mamba", tmp_path)
    with pytest.raises(ConfigError, match=r"the layer '.*mixer' keeps a state of each sequence"):
        EngineCore(fixed(tmp_path))


@pytest.fixture
def core(fixed_shapes: None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    """An engine without programs of its own: they are the module, as it is."""
    monkeypatch.setattr(
        "opgraft.engine.runner.bucketed_runner.exported", lambda module, *arguments: module
    )
    monkeypatch.setattr(
        "opgraft.engine.runner.bucketed_runner.compiled", lambda module, *how: module
    )
    return EngineCore(fixed(checkpoint, compilation_config={"fail_on_recompile": False}))


def test_prompt_logprobs_are_refused(core: EngineCore) -> None:
    """A request for the log-probabilities of its prompt fails alone, and says why."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    asking = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    core.add(
        [Request("asks", prompts(5)[0], asking), other := Request("other", prompts(5)[0], params)]
    )
    errors = {output.request_id: output for output in news(core) if output.error}
    assert list(errors) == ["asks"]
    assert errors["asks"].refused
    assert "prompt_logprobs asks for the logits of all tokens of a prompt" in errors["asks"].error
    assert len(other.output) == 3
    expect_empty(core)


def test_a_program_that_is_compiled_in_a_step(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a warning, and where the setting says so an error of the requests of that step; later ones go on."""
    runner, given = (
        core.executor.worker.runner,
        Request("a", prompts(5)[0], SamplingParams(temperature=0)),
    )
    runner.built += 1
    with caplog.at_level(logging.WARNING, "opgraft"):
        serve(core, [given])
    assert "1 program compiled in a step, though all shapes were before" in caplog.text
    runner.opgraft_config = replaced(
        runner.opgraft_config, compilation_config={"fail_on_recompile": True}
    )
    runner.built += 2
    core.add([Request("b", prompts(5)[0], SamplingParams(temperature=0))])
    (failed,) = news(core)
    assert "RecompilationError: 2 programs compiled in a step" in failed.error
    serve(core, [Request("c", prompts(5)[0], SamplingParams(temperature=0))])


def test_what_is_not_finite_fails_its_request(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device says by a token that there is none; the sampler finds out why, and others have their tokens."""
    runner = core.executor.worker.runner
    compute, broken = runner.model.compute_logits, [1]

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[broken] = float("nan")
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", spoilt)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    asked = [Request(str(i), [5 + i], params) for i in range(3)]
    core.add(asked)
    errors = {output.request_id: output.error for output in news(core) if output.error}
    assert "logits are NaN" in errors["1"]
    assert len(asked[0].output) == 3


def test_limits_give_the_shapes(core: EngineCore, checkpoint: Path) -> None:
    """Buckets end where the limits of a step do: tokens, sequences and the longest context."""
    assert [(s.sequences, s.tokens) for s in core.executor.worker.runner.shapes] == [
        (8, 1),
        (1, 8),
        (1, 16),
    ]
    larger = replaced(
        fixed(checkpoint), scheduler={"max_num_seqs": 17, "max_num_batched_tokens": 2048}
    )
    shapes = EngineCore(larger).executor.worker.runner.shapes
    assert [(s.sequences, s.tokens) for s in shapes] == [
        (8, 1), (16, 1), (24, 1), (1, 8), (1, 16), (1, 32), (1, 64)
    ]  # fmt: skip


def test_the_memory_of_the_largest_step_has_a_bound(core: EngineCore) -> None:
    """It is at least what attention's scores of the longest chunk take, and does not count the cache."""
    runner = core.executor.worker.runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opgraft.engine.runner.bucketed_runner.exported", exported)
        peak = runner.peak_of_largest_step(lambda: 0)
    scores = 4 * 16 * 64 * 4
    assert scores < peak < 40 * scores


def test_programs_go_through_the_graph_of_a_plugin(checkpoint: Path, fixed_shapes: None) -> None:
    """Each program has one, which a step calls in its place."""
    called: set[int] = set()

    class Counting(StepGraph):
        def __call__(self, inputs: Any, *caches: Any) -> Any:
            called.add(id(self))
            return super().__call__(inputs, *caches)

    PluggableClass.register_oot(Counting, name="step_graph")
    core = EngineCore(fixed(checkpoint, scheduler={"max_num_batched_tokens": 8}))
    PluggableClass.unregister_oot(Counting)
    runner = core.executor.worker.runner
    assert called == {id(graph) for graph in (*runner.programs.values(), runner._copy)}
    called.clear()
    serve(
        core,
        [Request("one", [5, 6, 7], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))],
    )
    assert len(called) == 2  # a prompt's and that of single tokens


class Losing(torch.nn.Module):
    """Adds a tensor for which the first traces have no node."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.traces = iter([disable_proxy_modes_tracing] * times + [contextlib.nullcontext] * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with next(self.traces)():
            values = torch.arange(len(x))
        return x + values


def test_a_trace_that_loses_a_tensor_is_made_again() -> None:
    """The second trace is what counts; if it loses a tensor, too, torch's error says so."""
    x = torch.zeros(3)
    assert torch.equal(exported(Losing(1), x, [])(x), torch.arange(3.0))
    with pytest.raises(RuntimeError, match="found a fake tensor"):
        exported(Losing(2), x, [])
