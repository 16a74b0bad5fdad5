"""The names by which settings and plugins call the ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opgraft import (
    CompilationConfig,
    CustomOp,
    OpgraftConfig,
    load_plugins,
    maybe_get_oot_by_class,
    ops,
    set_config,
)
from opgraft.errors import RegistrationError, UnknownTargetError

NAMES: dict[str, Any] = {
    "rms_norm": ops.RMSNorm,
    "gemma_rms_norm": ops.GemmaRMSNorm,
    "layer_norm": ops.LayerNorm,
    "silu_and_mul": ops.SiluAndMul,
    "gelu_and_mul": ops.GeluAndMul,
    "gelu_new": ops.NewGELU,
    "gelu_fast": ops.FastGELU,
    "quick_gelu": ops.QuickGELU,
    "gelu": ops.GELU,
    "silu": ops.SiLU,
    "linear": ops.Linear,
    "rotary_embedding": ops.RotaryEmbeddingBase,
    "apply_rotary_emb": ops.ApplyRotaryEmb,
    "dual_chunk_rotary_embedding": ops.DualChunkRotaryEmbedding,
    "quant_fp8": ops.QuantFP8,
    "quant_fp4": ops.QuantFP4,
    "conv2d": ops.Conv2dLayer,
    "conv3d": ops.Conv3dLayer,
    "grouped_topk": ops.GroupedTopk,
    "mm_encoder_attn": ops.MMEncoderAttention,
    "scaled_dot_product_attention": ops.ScaledDotProductAttention,
}
names = pytest.mark.parametrize("name", NAMES)


def without(name: str) -> Any:
    return set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=[f"-{name}"])))


@names
def test_name(name: str) -> None:
    """Each class is registered under its name, and says in its docstring where the maths comes from."""
    assert CustomOp.op_registry[name] is NAMES[name]
    assert "arXiv" in NAMES[name].__doc__ or name == "linear"


@names
def test_switch(name: str) -> None:
    """An op's name switches that op off and no other; encoder attention is always enabled."""
    with without(name):
        disabled = {other for other, cls in NAMES.items() if not cls.enabled()}
    assert disabled == {name} - {"mm_encoder_attn"}


@names
@pytest.mark.parametrize("named", ["op name", "class name", "module and class"])
def test_replacement(name: str, named: str) -> None:
    """A subclass that only adds a kernel replaces the op, called by op name, class name or module and class."""
    target = NAMES[name]
    module_and_class = f"{target.__module__}:{target.__name__}"
    wanted = {"op name": name, "class name": target.__name__, "module and class": module_and_class}[
        named
    ]
    forward_oot = lambda self, *args, **kwargs: self.forward_native(*args, **kwargs)  # noqa: E731
    replacement = type("Fast", (target,), {"forward_oot": forward_oot})
    CustomOp.register_oot(wanted)(replacement)
    assert maybe_get_oot_by_class(target) is replacement


def rope(cls: Any = ops.RotaryEmbedding) -> Any:
    return cls(8, 8, 16, 10000.0, True, torch.float32)


def test_a_variant_is_replaced_by_its_class_name() -> None:
    """``RotaryEmbedding`` names that class and neither its registered base nor the replacement of the same name."""

    class FastRope(ops.RotaryEmbedding):
        def forward_oot(self, positions: Any, query: Any, key: Any = None) -> Any:
            return query, key

    FastRope.__qualname__ = FastRope.__name__ = "RotaryEmbedding"
    CustomOp.register_oot("RotaryEmbedding")(FastRope)
    assert rope().op_class is FastRope
    assert rope(ops.RotaryEmbeddingBase).op_class is ops.RotaryEmbeddingBase
    assert dict(CustomOp.op_registry_oot) == {"RotaryEmbedding": FastRope}


@pytest.mark.parametrize(
    "name",
    [
        "Llama3RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
        "DeepseekScalingRotaryEmbedding",
        "MRotaryEmbedding",
    ],
)
def test_further_variants_are_targets(name: str) -> None:
    """The variants with other frequencies are replaced by their class names and switched with the plain op."""
    target = getattr(ops, name)
    replacement = type("Fast", (target,), {"forward_oot": lambda self, *args, **kwargs: args})
    CustomOp.register_oot(name)(replacement)
    assert maybe_get_oot_by_class(target) is replacement
    assert rope().op_class is ops.RotaryEmbedding
    with without("rotary_embedding"):
        assert not target.enabled()


def test_the_base_of_a_variant_is_replaced_alone() -> None:
    """Replacing ``rotary_embedding`` replaces the registered class and leaves its variants as they are."""

    class FastBase(ops.RotaryEmbeddingBase):
        def forward_oot(self, positions: Any, query: Any, key: Any = None) -> Any:
            return query, key

    CustomOp.register_oot("rotary_embedding")(FastBase)
    assert rope(ops.RotaryEmbeddingBase).op_class is FastBase
    assert rope().op_class is ops.RotaryEmbedding


def test_a_variant_is_switched_with_its_op() -> None:
    """``-rotary_embedding`` disables ``RotaryEmbedding`` too."""
    with without("rotary_embedding"):
        assert not ops.RotaryEmbedding.enabled()


def test_apply_rotary_emb_can_be_enforced() -> None:
    """``enforce_enable=True`` enables an instance that the settings disable."""
    with without("apply_rotary_emb"):
        enforced, switched = ops.ApplyRotaryEmb(enforce_enable=True), ops.ApplyRotaryEmb()
    reasons = [op.decision.reason for op in (enforced, switched)]
    assert "enforce_enable" not in reasons[1]
    assert reasons[0] != reasons[1]


def test_a_subclass_elsewhere_is_no_target() -> None:
    """A class of another package that derives from an op is not found by its name; the names nearby are offered."""
    cls = type("RotaryEmbeddin", (ops.RotaryEmbedding,), {"__module__": "elsewhere"})
    cls.__qualname__ = cls.__name__
    with set_config(OpgraftConfig(strict=True)):
        load_plugins()
        with pytest.raises(UnknownTargetError, match="did you mean 'RotaryEmbedding'"):
            CustomOp.register_oot("RotaryEmbeddin")(cls)


def test_a_class_cannot_replace_itself() -> None:
    """A replacement in an op's own package that names no target, and so names itself, is rejected."""

    @CustomOp.register("double_up")
    class DoubleUp(CustomOp):
        def forward_native(self, x: Any) -> Any:
            return 2 * x

    triple = type("Triple", (DoubleUp,), {"__module__": DoubleUp.__module__})
    with pytest.raises(RegistrationError, match=r"Triple .* is declared to replace itself"):
        CustomOp.register_oot()(triple)
