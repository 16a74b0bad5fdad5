"""Each op of the catalogue is replaced by a plugin of another distribution, and told of as replaced."""

from __future__ import annotations

import functools
import importlib
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
from opgraft.ops.attention.latent import MLAModules
from opgraft.ops.moe.fused.methods import FusedMoEConfig
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
    hidden_size=12,
    mamba_num_heads=4,
    hidden_size_per_head=6,
    mamba_d_state=5,
    mamba_d_conv=4,
    rms_norm_eps=1e-6,
)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X = drawn(3, 8)
IDS, SHARES = torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.full((3, 2), 0.5)
ROPE = (8, 8, 16, 10000.0, True, torch.float32)
POSITIONS, HEADS = torch.arange(3), drawn(3, 2, 8)
MOE = FusedMoEConfig(4, 2, 8, 6)


def latent_modules() -> MLAModules:
    """Layers of latent attention, of which the test constructs the whole only."""
    part = ops.ReplicatedLinear(8, 8, bias=False, return_bias=False)
    names = MLAModules.__dataclass_fields__
    given = dict.fromkeys(
        ("kv_a_layernorm", "kv_b_proj", "o_proj", "kv_a_proj_with_mqa", "q_proj"), part
    )
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
    "attention": (lambda c: c(2, 4, 0.5), lambda op: op(drawn(3, 8), drawn(3, 8), drawn(3, 8))),
    "column_parallel_linear": (lambda c: c(8, 4), lambda op: run(op, X)),
    "experts": (lambda c: c(4, 8, 6), lambda op: run(op, X, IDS, SHARES)),
    "fused_moe": (experts, lambda op: op(X, drawn(3, 4))),
    "gated_mlp": (lambda c: c(8, 6), lambda op: op(X)),
    "linear_act": (lambda c: c(ops.Linear(8, 4), ops.GELU()), lambda op: op(X)),
    "linear_add_norm": (lambda c: c(ops.Linear(8, 8), ops.LayerNorm(8)), lambda op: op(X, X)),
    "logits_processor": (
        lambda c: c(64),
        lambda op: op(filled(ops.ParallelLMHead(64, 8)), X),
    ),
    "mamba_mixer": (lambda c: c(12, 5, 4, 24, 3, True, True, True, prefix="m"), None),
    "mamba_mixer2": (lambda c: c(12, 5, 4, 24, True, True, 2, 4, 6, prefix="m"), None),
    "mixer2_gated_rms_norm": (lambda c: c(8, 2), lambda op: op(X, X)),
    "mla_attention": (
        lambda c: c(2, 0.5, 4, 4, 4, None, 8, ops.ReplicatedLinear(8, 16, bias=False)),
        None,
    ),
    "mlp": (lambda c: c(ops.Linear(8, 4), ops.GELU(), ops.Linear(4, 8)), lambda op: op(X)),
    "modular_fused_moe": (
        lambda c: c(ops.UnquantizedFusedMoEMethod(MOE)),
        lambda op: op.apply(experts(ops.FusedMoE), X, SHARES, IDS),
    ),
    "multi_head_latent_attention": (
        lambda c: c(8, 2, 0.5, 4, 4, 4, None, 8, latent_modules()),
        None,
    ),
    "parallel_lm_head": (lambda c: c(64, 8), None),
    "plamo2_mamba_mixer": (
        lambda c: c(SimpleNamespace(model_config=SimpleNamespace(hf_config=PLAMO)), prefix="m"),
        None,
    ),
    "replicated_linear": (lambda c: c(8, 4), lambda op: run(op, X)),
    "rotary_embedding": (lambda c: c(*ROPE), lambda op: op(POSITIONS, drawn(3, 16), drawn(3, 16))),
    "row_parallel_linear": (lambda c: c(8, 4), lambda op: run(op, X)),
    "short_conv": (
        lambda c: c(SimpleNamespace(conv_L_cache=3, conv_bias=True), 12, 0, prefix="m"),
        None,
    ),
    "transformers_fused_moe": (experts, lambda op: op(X, IDS, SHARES)),
    "transposed_linear": (lambda c: c(8, 4), lambda op: op(X)),
    "unscaled_rms_norm": (lambda c: c(), lambda op: op(X)),
    "vocab_parallel_embedding": (lambda c: c(64, 8), lambda op: run(op, torch.tensor([1, 5]))),
}
"""How an op that no spec of its family builds is made of its class and, where that is cheap, called."""

OWN = [name for name, cls in CustomOp.op_registry.items() if cls.__module__.startswith("opgraft.")]


def apply(given: Any, op: Any) -> Any:
    return op(**given) if isinstance(given, dict) else op(*given)


def by_spec(target: Any) -> tuple[Any, Call]:
    """Construct the replaced op as a spec of its family does, and call it with what goes with that."""
    family = importlib.import_module(f"{target.__module__.rpartition('.')[0]}.spec")
    for spec in family.SPECS:
        for variant in spec.variants if spec.module else ():
            op, given = spec.module(
                **spec.arguments(variant, spec.dtypes[0], spec.leads[1], spec.sizes[1])
            )
            if op.op_class.__module__ == "vendor_op":
                return op, functools.partial(apply, given)
    pytest.fail(f"no spec of its family builds {target.__name__}: OPS needs a row that does")


def test_every_row_is_of_an_op() -> None:
    """No row is left of an op that is gone. An op with a spec needs none, so that nobody writes its name here."""
    assert OPS.keys() <= set(OWN)


@pytest.mark.parametrize("name", OWN)
def test_a_plugin_replaces(name: str, site: Site) -> None:
    """Constructing the op gives the replacement, calls reach it, and ``opgraft ops explain`` tells whose it is."""
    target: Any = CustomOp.op_registry[name]
    reference = reference_method(target)
    method = "forward" if reference == "forward" else "forward_oot"
    source = {
        "module": target.__module__,
        "target": target.__name__,
        "method": method,
        "reference": reference,
    }
    site.plugin("vendor-op", PLUGIN.format(**source))
    load_plugins()
    row = OPS.get(name)
    made, call = (row[0](target), row[1]) if row else by_spec(target)
    assert made.op_class.__name__ == f"Vendor{target.__name__}"
    assert made.op_class.__module__ == "vendor_op"
    if call is not None:
        import vendor_op

        vendor_op.CALLS.clear()
        call(made)
        assert vendor_op.CALLS
    told = json.loads(CliRunner().invoke(commands, ["ops", "explain", name, "--json"]).stdout)
    kernel = told["decision"]
    choice = next(
        part for part in kernel["parts"] if part["subject"] == f"class of {target.__name__}"
    )
    winner = next(row for row in choice["candidates"] if row["accepted"])
    assert kernel["chosen"] == f"Vendor{target.__name__}.{method}"
    assert (choice["chosen"], winner["provider"]["name"]) == (
        f"Vendor{target.__name__}",
        "vendor-op",
    )
    assert "vendor_op.py:" in winner["location"]
