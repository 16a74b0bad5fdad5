"""Norms, activations and rotary embeddings."""

from __future__ import annotations

from typing import Any

from opgraft import functional
from torch import Tensor
from vllm.model_executor.layers import activation, layernorm, rotary_embedding

from opgraft_vllm.operators import operator
from opgraft_vllm.replacing import is_taken, replace_forward
from opgraft_vllm.report import REPORT

ACTIVATIONS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("FatreluAndMul", functional.fatrelu_and_mul, ("threshold",)),
    ("SiluAndMul", functional.silu_and_mul, ()),
    ("MulAndSilu", functional.mul_and_silu, ()),
    ("GeluAndMul", functional.gelu_and_mul, ("approximate",)),
    ("SwigluOAIAndMul", functional.swigluoai_and_mul, ("alpha", "limit")),
    ("SwigluStepAndMul", functional.swiglustep_and_mul, ("limit",)),
    ("GELU", functional.gelu, ()),
    ("GELUTanh", functional.gelu_tanh, ()),
    ("NewGELU", functional.gelu_new, ()),
    ("FastGELU", functional.gelu_fast, ()),
    ("QuickGELU", functional.quick_gelu, ()),
    ("ReLUSquaredActivation", functional.relu2, ()),
)
"""Class of vLLM, form of opgraft, and the attributes of the class that the form takes."""


def replace_ops() -> None:
    """Replace all classes for which opgraft has a kernel."""
    for name, form, settings in ACTIVATIONS:
        target = getattr(activation, name, None)
        if target is None:
            REPORT.leave(name, "this version of vLLM has no such class")
        else:
            _replace_activation(target, form, settings)
    _replace_norm(layernorm.RMSNorm, functional.rms_norm, functional.fused_add_rms_norm)
    _replace_norm(
        layernorm.GemmaRMSNorm, functional.gemma_rms_norm, functional.fused_add_gemma_rms_norm
    )
    _replace_rotary_embeddings()


def _replace_rotary_embeddings() -> None:
    base: Any = rotary_embedding.RotaryEmbedding
    for cls in list(vars(rotary_embedding).values()):
        if not isinstance(cls, type) or not issubclass(cls, base):
            continue
        if _rotates_alike(cls, base):
            _replace_rotary(cls)
        else:
            REPORT.leave(cls.__name__, "it rotates in another way than opgraft's kernel")


def _rotates_alike(cls: Any, base: Any) -> bool:
    """Return True if a variant differs from the base by its table of cosines only."""
    methods = ("forward", "forward_cpu", "forward_native", "forward_static")
    return all(getattr(cls, name) is getattr(base, name) for name in methods)


def _replace_activation(target: Any, form: Any, settings: tuple[str, ...]) -> None:
    run = operator(form)
    if run is None or is_taken(target):
        return

    def forward(self: Any, x: Tensor) -> Tensor:
        result: Tensor = run(x, *[getattr(self, name) for name in settings])
        return result

    replace_forward(target, (form.name,), forward)


def _replace_norm(target: Any, form: Any, fused: Any) -> None:
    run = operator(form)
    run_fused = operator(fused)
    if run is None or run_fused is None or is_taken(target):
        return

    def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        # opgraft's kernel has a weight, and no size of its own for the variance.
        if not getattr(self, "has_weight", True) or getattr(self, "variance_size_override", None):
            return target.forward(self, x, residual)
        if residual is None:
            return run(x, self.weight, self.variance_epsilon)
        return run_fused(x, residual, self.weight, self.variance_epsilon)

    replace_forward(target, (form.name, fused.name), forward)


def _replace_rotary(target: Any) -> None:
    run = operator(functional.rotary_embedding)
    if run is None or is_taken(target):
        return

    def forward(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if key is None:
            return target.forward(self, positions, query, key)
        table = self.cos_sin_cache.to(query.device, query.dtype)
        return run(positions, query, key, self.head_size, table, self.is_neox_style)

    replace_forward(target, ("rotary_embedding",), forward)
