"""A step whose model ``torch.compile`` has compiled gives the tokens that it gives otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.config import CompilationConfig, OpgraftConfig, set_config
from opgraft.engine.core import EngineCore
from opgraft.errors import ConfigError, LayerError
from opgraft.ops.attention import Attention
from opgraft.ops.attention.node import AttentionNodes
from support.engines import news, prompts, recorded, serve, settings
from support.random_decoders import DECODERS, THROUGH_TRANSFORMERS, through_transformers, written

FAMILIES = (
    "llama 3, with biases, tied",
    pytest.param("gemma2", marks=pytest.mark.slow),
    "deepseek v2",
    "mixtral",
)
LEVELS = [
    *(
        pytest.param(*getattr(each, "values", (each,)), 1, marks=getattr(each, "marks", ()))
        for each in FAMILIES
    ),
    *(pytest.param(each, 1, marks=pytest.mark.slow) for each in ("qwen3", "gemma")),
    *(
        pytest.param(each, level, marks=pytest.mark.slow)
        for each in ("llama", "qwen3", "gemma", "mixtral")
        for level in (2, 3)
    ),
]
"""A family, and the level at which its model is compiled."""


def with_mode(
    folder: Path, mode: str = "STOCK_TORCH_COMPILE", backend: str = "aot_eager", **model: Any
) -> OpgraftConfig:
    given = settings(folder)
    compilation = CompilationConfig(mode=mode, backend=backend, custom_ops=["all"])
    return dataclasses.replace(
        given, compilation_config=compilation, model=dataclasses.replace(given.model, **model)
    )


def tokens(core: EngineCore) -> list[list[int]]:
    """Greedy tokens of prompts in chunks, beside each other, and of a last one that stays alone."""
    requests = [
        recorded(str(i), prompt, 6 + 6 * (i == 2))[0] for i, prompt in enumerate(prompts(19, 3, 1))
    ]
    serve(core, requests)
    return [request.output for request in requests]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_the_modules(family: str, tmp_path: Path) -> None:
    """One graph serves prompts and batches of any size, one a single token; nothing is compiled while requests run."""
    if family in THROUGH_TRANSFORMERS:
        through_transformers(family, tmp_path)
    else:
        written(DECODERS[family][0], tmp_path, **{**DECODERS[family][1], "num_hidden_layers": 1})
    expected = tokens(EngineCore(settings(tmp_path)))
    core = EngineCore(with_mode(tmp_path))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert tokens(core) == expected
    (runner,) = [row for row in core.explain().classes if row.name == "model_runner"]
    assert runner.remark == "the model is compiled by aot_eager"


@pytest.mark.filterwarnings("ignore:.*script_method.*")
@pytest.mark.parametrize(("family", "level"), LEVELS)
def test_at_a_level(family: str, level: int, tmp_path: Path) -> None:
    """The graph that opgraft captures, with its passes and kernels, serves any number of tokens as the modules do."""
    if family in THROUGH_TRANSFORMERS:
        through_transformers(family, tmp_path)
    else:
        written(DECODERS[family][0], tmp_path, **DECODERS[family][1])
    given = settings(tmp_path)
    core = EngineCore(dataclasses.replace(given, compilation_config=CompilationConfig(level=level)))
    assert tokens(core) == tokens(EngineCore(given))
    (runner,) = [row for row in core.explain().classes if row.name == "model_runner"]
    assert runner.remark == f"the model is compiled by {'eager' if level == 1 else 'inductor'}"


@pytest.mark.parametrize("strict", [True, False])
def test_strict_mode_compiles_nothing_while_requests_run(strict: bool, tmp_path: Path) -> None:
    """A step that torch.compile would compile anew fails its requests in strict mode; the error names the guard."""
    written("Llama", tmp_path, num_hidden_layers=1)
    with set_config(OpgraftConfig(strict=strict)):
        core = EngineCore(dataclasses.replace(with_mode(tmp_path, backend="eager"), strict=strict))
        assert all(tokens(core))
        norm = core.executor.worker.runner.model.model.norm
        norm.weight = torch.nn.Parameter(norm.weight.repeat_interleave(2)[::2], requires_grad=False)
        core.add([recorded("other", prompts(3)[0], 4)[0]])
        errors = [output.error for output in news(core) if output.error]
    assert len(errors) == strict
    for error in errors:
        assert "RecompilationError: strict mode: LlamaForCausalLM would be compiled anew" in error
        assert "['norm']._parameters['weight']" in error


def test_in_pieces_that_are_recorded(tmp_path: Path) -> None:
    """What is between attention layers is padded and replayed, attention itself sees the tokens of the step alone."""
    written("Llama", tmp_path)
    given = settings(tmp_path)
    compilation = CompilationConfig(level=1, graph_mode="piecewise", capture_sizes=(1, 4))
    core = EngineCore(dataclasses.replace(given, compilation_config=compilation))
    assert tokens(core) == tokens(EngineCore(given))


def test_whole_steps_need_a_platform_that_records(tmp_path: Path) -> None:
    """Where nothing records a whole step, the engine refuses the mode at its start, before the model is read."""
    compilation = CompilationConfig(level=1, graph_mode="full", capture_sizes=(1, 4))
    given = settings(tmp_path / "no such model")
    with pytest.raises(
        ConfigError, match=r"graph_mode is full, and the platform cpu has no graph_class"
    ):
        EngineCore(dataclasses.replace(given, compilation_config=compilation))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated"
)  # torch's own, where inductor starts
def test_by_inductor(tmp_path: Path) -> None:
    """The backend that is the default compiles the model here."""
    written("Llama", tmp_path, num_hidden_layers=1)
    assert tokens(EngineCore(with_mode(tmp_path, backend="inductor"))) == tokens(
        EngineCore(settings(tmp_path))
    )


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inductor finds no compiler the start of the engine says so, and what to set."""
    written("Llama", tmp_path / "model", num_hidden_layers=1)
    # As of CXX, which torch has read when it was imported. Nothing is taken from a cache.
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"compilation_config\.mode is set") as caught:
        EngineCore(with_mode(tmp_path / "model", backend="inductor"))
    assert "inductor needs a C++ compiler" in str(caught.value)
    assert "no-such-compiler" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_invariant": True}, "does not compute each token alike"),
        (
            {"backend": "no_such_backend"},
            "backend is 'no_such_backend', which cannot be used here",
        ),
        ({"backend": ""}, "backend is '', which cannot be used here"),
    ],
)
def test_what_cannot_be_compiled(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The start of the engine says what contradicts what, before anything is compiled."""
    written("Llama", tmp_path, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=message):
        EngineCore(with_mode(tmp_path, **given))


def test_what_no_mode_follows(tmp_path: Path) -> None:
    """Passes are refused where nothing is compiled, as opgraft.compile refuses them."""
    written("Llama", tmp_path, num_hidden_layers=1)
    given = dataclasses.replace(
        settings(tmp_path), compilation_config=CompilationConfig(user_passes=["a:B"])
    )
    with pytest.raises(
        ConfigError, match=r"user_passes is set, and is for the mode FULL; .*mode is NONE"
    ):
        EngineCore(given)


def test_ropes_that_depend_on_the_context(tmp_path: Path) -> None:
    """A rope that is fitted to each call has no graph."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    written("Llama", tmp_path, num_hidden_layers=1, rope_parameters=rope)
    with pytest.raises(
        ConfigError, match="ropes that depend on the length of the context, which no graph has"
    ):
        EngineCore(with_mode(tmp_path))


def test_a_node_without_its_layer() -> None:
    """A graph with attention as a node gives what the layer gives, and says what it needs where it is called alone."""
    layer, x = Attention(2, 8, 1.0, prefix="attn"), torch.ones(3, 16)
    layer.is_node = True
    plain = torch.compile(layer, backend="eager", fullgraph=True)
    with AttentionNodes({"attn": layer}).entered():
        torch.testing.assert_close(plain(x, x, x), layer(x, x, x))
    with pytest.raises(
        LayerError,
        match=r"'attn' as a node, and none of that prefix is given: call the graph within",
    ):
        plain(x, x, x)
