"""The op classes of this plugin. Each class replaces the catalogue's class of the same name.

The kernels have no backward. If a gradient is required, opgraft's native definition runs.
"""

from __future__ import annotations

import opgraft
from opgraft import ops as catalogue

from opgraft_jax import kernels


def _kernels(*names: str) -> opgraft.FunctionalKernels:
    """Return the kernels of these functional forms."""
    functions = {name: getattr(kernels, name) for name in names}
    return opgraft.FunctionalKernels(functions, inference_only=True)


class JaxRMSNorm(catalogue.RMSNorm):
    """Computed in Pallas."""

    functional_oot = _kernels("rms_norm", "fused_add_rms_norm")


class JaxSiluAndMul(catalogue.SiluAndMul):
    """Computed in Pallas."""

    functional_oot = _kernels("silu_and_mul")


class JaxGemmaRMSNorm(catalogue.GemmaRMSNorm):
    """Computed in ``jax.numpy``."""

    functional_oot = _kernels("gemma_rms_norm", "fused_add_gemma_rms_norm")


class JaxLayerNorm(catalogue.LayerNorm):
    """Computed in ``jax.numpy``."""

    functional_oot = _kernels("layer_norm")


class JaxGELU(catalogue.GELU):
    """Computed in ``jax.numpy``."""

    functional_oot = _kernels("gelu")


class JaxGeluAndMul(catalogue.GeluAndMul):
    """Computed in ``jax.numpy``."""

    functional_oot = _kernels("gelu_and_mul")


REPLACEMENTS = (JaxRMSNorm, JaxSiluAndMul, JaxGemmaRMSNorm, JaxLayerNorm, JaxGELU, JaxGeluAndMul)
