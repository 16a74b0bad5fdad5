"""Compiled engines: attention layers as nodes of the graph, by an op of the library or by the layers, and the plan."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.config import CacheConfig, CompilationConfig, OpgraftConfig, set_config
from opgraft.engine.core import EngineCore
from opgraft.ops import RMSNorm
from opgraft.ops.attention.decoder import attention_layers
from opgraft.ops.composites.composite import call_uncompiled
from support.engines import prompts, recorded, serve, settings
from support.random_decoders import written
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS = 2
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_key_value_heads": 2}
BLOCKS = CacheConfig(block_size=16, num_blocks=40)


class Following(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def engine(
    folder: Path, level: int = 1, cache: CacheConfig = BLOCKS, **compilation: Any
) -> EngineCore:
    given = dataclasses.replace(settings(folder), cache=cache)
    return EngineCore(
        dataclasses.replace(given, compilation_config=CompilationConfig(level=level, **compilation))
    )


def model_of(core: EngineCore) -> Any:
    executor: Any = core.executor
    return executor.worker.runner.model


def logits(core: EngineCore) -> dict[Any, Tensor]:
    """Serve prompts beside each other, the answers of which end at different steps."""
    pairs = [
        recorded(f"{number}", prompt, 4 + number) for number, prompt in enumerate(prompts(19, 3, 1))
    ]
    serve(core, [request for request, _ in pairs])
    return {
        (number, key): row
        for number, (_, each) in enumerate(pairs)
        for key, row in each.logits.items()
    }


def in_python(core: EngineCore) -> int:
    """Return the nodes of a run that Python was asked for."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        logits(core)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["opgraft_cpu_kernels::attend_layer"]
    return counts.get("opgraft::attend_layer", 0)


@pytest.fixture
def folder(kernels: Any, tmp_path: Path) -> Path:
    written(
        "Qwen3", tmp_path / "model", num_hidden_layers=LAYERS, **SHAPE
    )  # whose layers no plan computes
    return tmp_path / "model"


@pytest.mark.parametrize(
    "cache", [BLOCKS, dataclasses.replace(BLOCKS, dtype="int8")], ids=["plain", "codes"]
)
def test_a_graph_that_asks_no_python(folder: Path, cache: CacheConfig) -> None:
    """The nodes of all steps run in the library, and give what the layers give."""
    core, expected = engine(folder, cache=cache), logits(engine(folder, 0, cache))
    found = logits(core)
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        torch.testing.assert_close(found[key], row, rtol=1e-3, atol=1e-4)
    assert in_python(core) == 0
    (nodes,) = [row for row in core.explain().classes if row.name == "attention_nodes"]
    assert str(nodes.provider).startswith("opgraft-cpu-kernels ")


def test_a_plan_that_declines_looks_nothing_up(folder: Path) -> None:
    """Ids are looked up by the graph alone where no plan computes the layers, which says so of each call."""
    core, seen = engine(folder), list[int]()
    model_of(core).model.embed_tokens.register_forward_hook(
        lambda *_: seen.append(1)
    )  # the graph has none
    logits(core)
    assert (seen, by_plan(core)[0]) == ([], 0)
    assert by_plan(core)[1] > 3


def test_what_the_library_leaves_to_layers(folder: Path) -> None:
    """Blocks that the kernels do not take, hooks, and what follows the operators that run are left to the layers."""
    assert in_python(engine(folder, cache=CacheConfig(block_size=8, num_blocks=40))) > 0
    core, seen = engine(folder), list[Tensor]()
    hooked = next(iter(attention_layers(model_of(core)).values()))
    handle = hooked.register_forward_hook(lambda layer, args, output: seen.append(output))
    assert in_python(core) == len(seen) > 0
    handle.remove()
    assert in_python(core) == 0
    with Following():
        assert in_python(core) == LAYERS * len(seen)


def test_a_hook_that_is_set_between_steps(folder: Path) -> None:
    """A hook is seen by the next step, though no sequence is new, and so are new pages."""
    core, seen = engine(folder), list[int]()
    (request, _) = recorded("0", prompts(3)[0], 40)
    core.add([request])
    for step in range(38):  # over several blocks
        if step == 20:
            layer = next(iter(attention_layers(model_of(core)).values()))
            layer.register_forward_hook(lambda *_: seen.append(1))
        core.step()
    assert len(seen) == 18
    (other, _) = recorded("1", prompts(3)[0], 40)
    plain = engine(folder, 0)
    plain.add([other])
    for _ in range(38):
        plain.step()
    assert request.output == other.output


def by_plan(core: EngineCore) -> tuple[int, int]:
    """Return how many calls the plan has computed, and how many it was asked for."""
    (plan,) = [row for row in core.explain().classes if row.name == "decoder_plan"]
    computed, calls = re.findall(r"^(\d+) of (\d+) calls", plan.remark)[0]
    return int(computed), int(calls)


@pytest.mark.filterwarnings("ignore:.*script_method.*")  # torch's own, where inductor starts
@pytest.mark.parametrize(
    ("level", "compilation", "planned"),
    [
        (1, {}, True),
        pytest.param(2, {}, True, marks=pytest.mark.slow),
        (1, {"graph_mode": "piecewise", "capture_sizes": [1]}, False),
    ],
    ids=["O1", "O2", "recorded"],
)
def test_what_the_plan_takes(
    kernels: Any, tmp_path: Path, level: int, compilation: dict[str, Any], planned: bool
) -> None:
    """The plan computes calls of a compiled engine as of any other, but where settings say how the graph
    runs."""
    import opgraft_cpu_kernels

    if "avx512_bf16" not in opgraft_cpu_kernels.paths():
        pytest.skip("this CPU lacks avx512_bf16, on which the plan takes any number of tokens")
    opgraft_cpu_kernels.set_path("avx512_bf16")
    written("Llama", tmp_path, num_hidden_layers=LAYERS, **SHAPE)
    core, expected = engine(tmp_path, level, **compilation), logits(engine(tmp_path, 0))
    before, found = by_plan(core), logits(core)
    computed, calls = (now - then for now, then in zip(by_plan(core), before, strict=True))
    assert (computed > 0, computed) == (planned, calls)
    tolerance = 0 if planned else 1e-3
    for key, row in expected.items():
        torch.testing.assert_close(found[key], row, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("given", "kernel"),
    [
        ({"compilation_config": CompilationConfig(level=2)}, "forward_cpu"),
        (
            {"compilation_config": CompilationConfig(level=2, custom_ops=["+linear", "-rms_norm"])},
            "forward_native",
        ),
        ({"compilation_config": CompilationConfig(level=2, custom_ops=["none"])}, "forward_native"),
        (
            {"compilation_config": CompilationConfig(level=2), "providers": {"rms_norm": "native"}},
            "forward_native",
        ),
    ],
    ids=["level", "-rms_norm", "none", "native"],
)
def test_what_is_left_to_a_compiler(kernels: Any, given: dict[str, Any], kernel: str) -> None:
    """An op that is disabled for the compiler alone has a kernel for the plan; one that somebody disables has none."""
    with set_config(OpgraftConfig(**given)):
        binding = RMSNorm(16).binding
    choice, own = binding.kernel, kernel == "forward_cpu"
    assert binding.function("rms_norm") is None
    assert (binding.function("rms_norm", compiled=False) is not None) == own
    assert (choice.winner.method, choice.eager.method) == ("forward_native", kernel)
    assert ("a DecoderPlan takes this" in str(choice.decision)) == own


def test_what_is_called_behind_a_plan() -> None:
    """The kernel of an op that is left to a compiler, but for one that somebody listens to."""

    @RMSNorm.register_oot
    class Zeros(RMSNorm):
        def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
            return torch.zeros_like(x)

    x, called = torch.ones(3, 8), []
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(level=2))):
        norm = RMSNorm(8)
    assert norm(x).any()
    assert not call_uncompiled(norm, x).any()
    norm.register_forward_hook(lambda *args: called.append(args))
    assert call_uncompiled(norm, x).any()
    assert len(called) == 1
