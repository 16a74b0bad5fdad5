"""Steps of a layer that follow one another, in one call of the library.

That is for ops whose own kernels are the plugin's, and for whose calls nobody waits: the results are the same bits as
those of calling each.
"""

from __future__ import annotations

from typing import Any

from opgraft.kernels import gradient_required, is_observed
from opgraft.ops import Linear
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.kernels import REFUSED, op
from opgraft_cpu_kernels.linear import takes_few


def runs(layer: Any, *kernels: object) -> bool:
    """Tell whether calling a layer does no more than to run one of these methods of the plugin's classes."""
    return type(layer).forward in kernels and not is_observed(layer)


def rotate_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Any:
    """Rotate query and key as ``ApplyRotaryEmb.rotate_heads`` does; ``None`` where the op must be called."""
    if is_dynamo_compiling() or gradient_required((query, key, cos, sin), {}):
        return None
    try:
        return _rotate_heads(query, key, cos, sin, is_neox_style)
    except REFUSED:
        return None


def gated_mlp(joint: Linear, down: Linear, x: Tensor, activation: str) -> Tensor | None:
    """Compute ``down(act(gate(x)) · up(x))``, gate and up by ``joint``; ``None`` where the layers must be called.

    Both are of one class, whose kernel is the plugin's.
    """
    held = down._parameters
    gate_up, weight = joint._parameters["weight"], held.get("weight")
    if (
        type(weight) is not nn.Parameter
        or "bias" not in held
        or down.activation != "none"
        or gate_up is None
    ):
        return None
    bias = held["bias"]
    if not takes_few(x, gate_up, weight, bias):
        return None
    try:
        return _gated_mlp(x, gate_up, joint._parameters["bias"], weight, bias, activation)  # type: ignore[no-any-return]
    except REFUSED:
        return None


_rotate_heads = op("rotate_heads")
_gated_mlp = op("gated_mlp")
