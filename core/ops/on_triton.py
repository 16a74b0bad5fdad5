"""The way to the Triton kernels from op classes, which must be importable where Triton is not installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MODULES = {
    "activation.triton": (
        "silu silu_ gelu gelu_tanh gelu_new gelu_fast quick_gelu relu2 xielu silu_and_mul mul_and_silu gelu_and_mul "
        "gelu_and_mul_sparse fatrelu_and_mul swigluoai_and_mul silu_and_mul_with_clamp swiglustep_and_mul"
    ),
    "layernorm.triton": (
        "rms_norm fused_add_rms_norm fused_add_rms_norm_ gemma_rms_norm fused_add_gemma_rms_norm "
        "fused_add_gemma_rms_norm_ rms_norm_gated layer_norm"
    ),
    "rotary.triton": "apply_rotary_emb rotary_embedding rotary_embedding_ mrope dual_chunk_rotary_embedding",
    "quantization.triton": "quant_fp8_static quant_fp8_dynamic",
}
_HOME = {form: module for module, forms in _MODULES.items() for form in forms.split()}


class _KernelsByForm(Mapping[str, Callable[..., Any]]):
    """Name of a form → its kernel, with the form's signature; the kernel's module is imported when it is asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, form: str) -> Callable[..., Any]:
        if form not in self._loaded:
            self._loaded[form] = getattr(importlib.import_module(f"{__package__}.{_HOME[form]}"), form)
        return self._loaded[form]

    def __iter__(self) -> Iterator[str]:
        return iter(_HOME)

    def __len__(self) -> int:
        return len(_HOME)


TRITON = _KernelsByForm()


def triton_missing() -> str | None:
    """For ``opgraft.needs``: why Triton kernels cannot run in this process, or ``None``."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed: pip install triton"
    try:
        for form in TRITON:
            TRITON[form]
    except ImportError as error:
        return f"needs Triton, whose import failed: {error}"
    return None
