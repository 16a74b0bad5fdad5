"""Layers for Hugging Face's package ``kernels`` that run the kernels of this process.

``kernels`` puts the ``forward`` of such a layer in place of a module's own. So a layer has no
state, and reads weights and settings of the module. Nothing here imports ``kernels``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from opgraft.binding.form_choice import choice_of
from opgraft.binding.functional import Functional
from opgraft.ops.activation import functional as activation
from opgraft.ops.layernorm import functional as layernorm
from opgraft.plugins.selection import current_platform
from torch import Tensor, nn


class _HubLayer(nn.Module):
    # A member that kernels asks for. It allows no others.
    can_torch_compile = True


class RMSNorm(_HubLayer):
    """Root mean square norm, by ``weight`` and ``variance_epsilon`` or ``eps`` of the module."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return layernorm.rms_norm(hidden_states, self.weight, eps)


class SiLU(_HubLayer):
    def forward(self, input: Tensor) -> Tensor:
        return activation.silu(input)


class GeLU(_HubLayer):
    def forward(self, input: Tensor) -> Tensor:
        return activation.gelu(input)


class GeluTanh(_HubLayer):
    def forward(self, input: Tensor) -> Tensor:
        return activation.gelu_tanh(input)


class NewGELU(_HubLayer):
    def forward(self, input: Tensor) -> Tensor:
        return activation.gelu_new(input)


class FastGELU(_HubLayer):
    def forward(self, input: Tensor) -> Tensor:
        return activation.gelu_fast(input)


class QuickGELU(_HubLayer):
    def forward(self, input: Tensor) -> Tensor:
        return activation.quick_gelu(input)


_LAYERS: Mapping[type[nn.Module], Functional[..., Any]] = MappingProxyType(
    {
        RMSNorm: layernorm.rms_norm,
        SiLU: activation.silu,
        GeLU: activation.gelu,
        GeluTanh: activation.gelu_tanh,
        NewGELU: activation.gelu_new,
        FastGELU: activation.gelu_fast,
        QuickGELU: activation.quick_gelu,
    }
)
"""Layer, by its name in transformers → the form of an op."""


@dataclass(frozen=True)
class LocalLayer:
    """A layer of this process, as ``kernels`` loads layers of the Hub.

    Attributes:
        layer: the class with the forward.
        kernel: the kernel that runs, with the provider, in words.
    """

    layer: type[nn.Module]
    kernel: str

    def load(self) -> type[nn.Module]:
        """Return the class of the layer."""
        return self.layer

    def __str__(self) -> str:
        return f"{self.kernel}, through opgraft"


def kernel_mapping() -> dict[str, dict[str, LocalLayer]]:
    """Return the layers with kernels here, for ``kernels.register_kernel_mapping``.

    A layer whose native definition would run is left out, so that the module's own code runs.

    Returns:
        Name of a layer → device type → the layer.

    Raises:
        OpgraftError: as constructing an op would.
    """
    device = current_platform().device_type
    mapping = {}
    for layer, form in _LAYERS.items():
        choice = choice_of(form)
        if not choice.is_native:
            kernel = f"{choice.kernel_name} of {choice.provider}"
            mapping[layer.__name__] = {device: LocalLayer(layer, kernel)}
    return mapping
