"""The classes that bring the kernels. None has a backward: where a gradient is required, the native definition runs."""

from __future__ import annotations

import opgraft
from opgraft import ops as catalogue

from opgraft_jax import kernels


def _kernels(*names: str) -> opgraft.FunctionalKernels:
    return opgraft.FunctionalKernels(
        {name: getattr(kernels, name) for name in names}, inference_only=True
    )


class JaxRMSNorm(catalogue.RMSNorm):
    """In Pallas."""

    functional_oot = _kernels("rms_norm", "fused_add_rms_norm")


class JaxSiluAndMul(catalogue.SiluAndMul):
    """In Pallas."""

    functional_oot = _kernels("silu_and_mul")


class JaxGemmaRMSNorm(catalogue.GemmaRMSNorm):
    """In ``jax.numpy``."""

    functional_oot = _kernels("gemma_rms_norm", "fused_add_gemma_rms_norm")


class JaxLayerNorm(catalogue.LayerNorm):
    """In ``jax.numpy``."""

    functional_oot = _kernels("layer_norm")


class JaxGELU(catalogue.GELU):
    """In ``jax.numpy``."""

    functional_oot = _kernels("gelu")


class JaxGeluAndMul(catalogue.GeluAndMul):
    """In ``jax.numpy``."""

    functional_oot = _kernels("gelu_and_mul")


REPLACEMENTS = (JaxRMSNorm, JaxSiluAndMul, JaxGemmaRMSNorm, JaxLayerNorm, JaxGELU, JaxGeluAndMul)
