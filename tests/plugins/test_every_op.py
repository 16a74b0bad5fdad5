"""Each op of the catalogue is replaced by a plugin of another distribution, and told of as replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import Site
from opgraft import ops
from opgraft.cli import cli as commands
from opgraft.ops import CustomOp
from opgraft.ops.fused_moe.methods import FusedMoEConfig
from opgraft.ops.latent_attention import MLAModules
from opgraft.plugins.host import load_plugins
from opgraft.registry.op_classes import reference_method
from torch import Tensor

PLUGIN = """
from {module} import {target}
platforms = "any"
CALLS = []

@{target}.register_oot
class Vendor{target}({target}):
    def {method}(self, *args, **kwargs):
        CALLS.append("{method}")
        return super().{reference}(*args, **kwargs)
"""

PLAMO = SimpleNamespace(
    hidden_size=12, mamba_num_heads=4, hidden_size_per_head=6, mamba_d_state=5, mamba_d_conv=4, rms_norm_eps=1e-6
)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X = drawn(3, 8)
IDS, SHARES = torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.full((3, 2), 0.5)
LOC = torch.tensor([0, 1, 3])
ROPE = (8, 8, 16, 10000.0, True, torch.float32)
POSITIONS, HEADS = torch.arange(3), drawn(3, 2, 8)
MOE = FusedMoEConfig(4, 2, 8, 6)


def latent_modules() -> MLAModules:
    """Layers of latent attention, of which the test constructs the whole only."""
    part = ops.ReplicatedLinear(8, 8, bias=False, return_bias=False)
    names = MLAModules.__dataclass_fields__
    given = dict.fromkeys(("kv_a_layernorm", "kv_b_proj", "o_proj", "kv_a_proj_with_mqa", "q_proj"), part)
    return MLAModules(**{**dict.fromkeys(names), **given})


def experts(cls: Callable[..., Any]) -> Any:
    return filled(cls(4, 2, 8, 6))


def filled(layer: Any) -> Any:
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def run(op: Any, *args: Any) -> None:
    filled(op)(*args)


Make = Callable[[Any], Any]
Call = Callable[[Any], Any]
OPS: dict[str, tuple[Make, Call | None]] = {
    "apply_rotary_emb": (lambda c: c(), lambda op: op(HEADS, drawn(3, 4), drawn(3, 4))),
    "attention": (lambda c: c(2, 4, 0.5), lambda op: op(drawn(3, 8), drawn(3, 8), drawn(3, 8))),
    "causal_conv1d": (lambda c: c(), lambda op: op(X, drawn(8, 4), LOC, drawn(2, 8, 3))),
    "causal_conv1d_update": (
        lambda c: c(),
        lambda op: op(X, drawn(3, 8, 3), drawn(8, 4), POSITIONS, torch.empty_like(X)),
    ),
    "column_parallel_linear": (lambda c: c(8, 4), lambda op: run(op, X)),
    "concat_and_cache_mla": (lambda c: c(), lambda op: op(X, drawn(3, 4), torch.zeros(2, 4, 12), POSITIONS)),
    "conv2d": (lambda c: c(3, 4, 2), lambda op: run(op, drawn(1, 3, 5, 5))),
    "conv3d": (lambda c: c(3, 4, 2), lambda op: run(op, drawn(1, 3, 5, 5, 5))),
    "dual_chunk_rotary_embedding": (lambda c: c(*ROPE, 8, 4), lambda op: op(POSITIONS, drawn(3, 16), drawn(3, 16))),
    "experts": (lambda c: c(4, 8, 6), lambda op: run(op, X, IDS, SHARES)),
    "fatrelu_and_mul": (lambda c: c(), lambda op: op(X)),
    "fp8_linear": (lambda c: c(8, 4), None),
    "fused_moe": (experts, lambda op: op(X, drawn(3, 4))),
    "gated_mlp": (lambda c: c(8, 6), lambda op: op(X)),
    "gelu": (lambda c: c(), lambda op: op(X)),
    "gelu_and_mul": (lambda c: c(), lambda op: op(X)),
    "gelu_and_mul_sparse": (lambda c: c(0.5), lambda op: op(X)),
    "gelu_fast": (lambda c: c(), lambda op: op(X)),
    "gelu_new": (lambda c: c(), lambda op: op(X)),
    "gelu_tanh": (lambda c: c(), lambda op: op(X)),
    "gemma_rms_norm": (lambda c: c(8), lambda op: op(X)),
    "grouped_topk": (lambda c: c(2, True), lambda op: op(X, drawn(3, 4))),
    "int8_dynamic_linear": (lambda c: c(8, 4), None),
    "layer_norm": (lambda c: c(8), lambda op: op(X)),
    "linear": (lambda c: c(8, 4), lambda op: op(X)),
    "linear_act": (lambda c: c(ops.Linear(8, 4), ops.GELU()), lambda op: op(X)),
    "linear_add_norm": (lambda c: c(ops.Linear(8, 8), ops.LayerNorm(8)), lambda op: op(X, X)),
    "logits_processor": (
        lambda c: c(64),
        lambda op: op(filled(ops.ParallelLMHead(64, 8)), X),
    ),
    "mamba_chunk_scan": (
        lambda c: c(4),
        lambda op: op(
            HEADS, drawn(3, 2).abs(), -drawn(2).abs(), drawn(3, 1, 5), drawn(3, 1, 5), LOC, drawn(2, 2, 8, 5)
        ),
    ),
    "mamba_mixer": (lambda c: c(12, 5, 4, 24, 3, True, True, True, prefix="m"), None),
    "mamba_mixer2": (lambda c: c(12, 5, 4, 24, True, True, 2, 4, 6, prefix="m"), None),
    "mixer2_gated_rms_norm": (lambda c: c(8, 2), lambda op: op(X, X)),
    "mla_attention": (lambda c: c(2, 0.5, 4, 4, 4, None, 8, ops.ReplicatedLinear(8, 16, bias=False)), None),
    "mla_paged_attention": (
        lambda c: c(8, 0.5),
        lambda op: op(drawn(1, 2, 12), drawn(2, 4, 12), torch.tensor([[0]]), torch.tensor([0, 1]), torch.tensor([3])),
    ),
    "mlp": (lambda c: c(ops.Linear(8, 4), ops.GELU(), ops.Linear(4, 8)), lambda op: op(X)),
    "mm_encoder_attn": (lambda c: c(2, 8), lambda op: op(HEADS[None], HEADS[None], HEADS[None])),
    "modular_fused_moe": (
        lambda c: c(ops.UnquantizedFusedMoEMethod(MOE)),
        lambda op: op.apply(experts(ops.FusedMoE), X, SHARES, IDS),
    ),
    "mul_and_silu": (lambda c: c(), lambda op: op(X)),
    "multi_head_latent_attention": (lambda c: c(8, 2, 0.5, 4, 4, 4, None, 8, latent_modules()), None),
    "paged_attention": (
        lambda c: c(0.5),
        None,
    ),
    "parallel_lm_head": (lambda c: c(64, 8), None),
    "plamo2_mamba_mixer": (
        lambda c: c(SimpleNamespace(model_config=SimpleNamespace(hf_config=PLAMO)), prefix="m"),
        None,
    ),
    "quant_fp8": (lambda c: c(False, (-1, -1)), lambda op: op(X)),
    "quantized_fused_moe": (lambda c: c(MOE, None), None),
    "quantized_linear": (lambda c: c(8, 4), None),
    "quick_gelu": (lambda c: c(), lambda op: op(X)),
    "relu": (lambda c: c(), lambda op: op(X)),
    "relu2": (lambda c: c(), lambda op: op(X)),
    "replicated_linear": (lambda c: c(8, 4), lambda op: run(op, X)),
    "rms_norm": (lambda c: c(8), lambda op: op(X)),
    "rms_norm_gated": (lambda c: c(8), lambda op: op(X)),
    "rotary_embedding": (lambda c: c(*ROPE), lambda op: op(POSITIONS, drawn(3, 16), drawn(3, 16))),
    "row_parallel_linear": (lambda c: c(8, 4), lambda op: run(op, X)),
    "scaled_dot_product_attention": (lambda c: c(), lambda op: op(HEADS[None], HEADS[None], HEADS[None])),
    "selective_scan": (
        lambda c: c(),
        lambda op: op(X, X.abs(), -drawn(8, 5).abs(), drawn(3, 5), drawn(3, 5), LOC, drawn(2, 8, 5)),
    ),
    "selective_state_update": (
        lambda c: c(),
        lambda op: op(
            drawn(3, 2, 8, 5),
            HEADS,
            HEADS.abs(),
            -drawn(2, 8, 5).abs(),
            drawn(3, 1, 5),
            drawn(3, 1, 5),
            POSITIONS,
            torch.empty_like(HEADS),
        ),
    ),
    "short_conv": (lambda c: c(SimpleNamespace(conv_L_cache=3, conv_bias=True), 12, 0, prefix="m"), None),
    "silu": (lambda c: c(), lambda op: op(X)),
    "silu_and_mul": (lambda c: c(), lambda op: op(X)),
    "silu_and_mul_with_clamp": (lambda c: c(7.0), lambda op: op(X)),
    "swigluoai_and_mul": (lambda c: c(), lambda op: op(X)),
    "swiglustep_and_mul": (lambda c: c(), lambda op: op(X)),
    "transformers_fused_moe": (experts, lambda op: op(X, IDS, SHARES)),
    "transposed_linear": (lambda c: c(8, 4), lambda op: op(X)),
    "unquantized_fused_moe": (
        lambda c: c(MOE),
        lambda op: op.apply(experts(ops.FusedMoE), X, SHARES, IDS),
    ),
    "unscaled_rms_norm": (lambda c: c(), lambda op: op(X)),
    "vocab_parallel_embedding": (lambda c: c(64, 8), lambda op: run(op, torch.tensor([1, 5]))),
    "write_kv_cache": (lambda c: c(), None),
    "xielu": (lambda c: c(), lambda op: op(X)),
}
"""How each op is made of its class and, where that is cheap, called."""


def test_no_op_is_left_out() -> None:
    """Every registered op of opgraft is in the table, so that one that is added is tried too."""
    own = {name for name, cls in CustomOp.op_registry.items() if cls.__module__.startswith("opgraft.")}
    assert own == OPS.keys()


@pytest.mark.parametrize("name", OPS)
def test_a_plugin_replaces(name: str, site: Site) -> None:
    """Constructing the op gives the replacement, calls reach it, and ``opgraft ops explain`` tells whose it is."""
    target: Any = CustomOp.op_registry[name]
    reference = reference_method(target)
    method = "forward" if reference == "forward" else "forward_oot"
    source = {"module": target.__module__, "target": target.__name__, "method": method, "reference": reference}
    site.plugin("vendor-op", PLUGIN.format(**source))
    load_plugins()
    make, call = OPS[name]
    made = make(target)
    assert made.op_class.__name__ == f"Vendor{target.__name__}"
    assert made.op_class.__module__ == "vendor_op"
    if call is not None:
        import vendor_op

        vendor_op.CALLS.clear()
        call(made)
        assert vendor_op.CALLS
    told = json.loads(CliRunner().invoke(commands, ["ops", "explain", name, "--json"]).stdout)
    kernel = told["decision"]
    choice = next(part for part in kernel["parts"] if part["subject"] == f"class of {target.__name__}")
    winner = next(row for row in choice["candidates"] if row["accepted"])
    assert kernel["chosen"] == f"Vendor{target.__name__}.{method}"
    assert (choice["chosen"], winner["provider"]["name"]) == (f"Vendor{target.__name__}", "vendor-op")
    assert "vendor_op.py:" in winner["location"]
