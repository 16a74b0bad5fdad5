"""Several steps of a layer in one call of the library.

The results are the same bits as those of calling each op. The steps run only if every op has a
kernel of this plugin, and if nothing observes the single calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opgraft.kernels import gradient_required, is_observed
from opgraft.ops import Linear
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.kernels import REFUSED, op
from opgraft_cpu_kernels.linear import takes_few


def runs(layer: Any, *kernels: object) -> bool:
    """Return True if calling a layer runs one of these methods and nothing else."""
    return type(layer).forward in kernels and not is_observed(layer)


def rotate_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Any:
    """Rotate query and key, both ``[batch, heads, tokens, head_size]``.

    Returns:
        Both tensors as ``ApplyRotaryEmb.rotate_heads`` returns them, or None if the caller has to
        call the op.
    """
    if is_dynamo_compiling() or gradient_required((query, key, cos, sin), {}):
        return None
    try:
        return _rotate_heads(query, key, cos, sin, is_neox_style)
    except REFUSED:
        return None


def gated_mlp(joint: Linear, down: Linear, x: Tensor, activation: str) -> Tensor | None:
    """Compute ``down(act(gate(x)) * up(x))``.

    Args:
        joint: the layer that computes gate and up, of the same class as ``down``.
        down: the second layer. Its kernel is this plugin's.
        x: the rows, ``[..., hidden_size]``.
        activation: the name of the activation.

    Returns:
        The rows in the shape of ``x``, or None if the caller has to call the layers.
    """
    # Asking a module for its parameters by attribute takes much longer than by this dictionary.
    parameters = down._parameters
    gate_up = joint._parameters["weight"]
    weight = parameters.get("weight")
    if type(weight) is not nn.Parameter or gate_up is None:
        return None
    if "bias" not in parameters or down.activation != "none":
        return None
    bias = parameters["bias"]
    if not takes_few(x, gate_up, weight, bias):
        return None
    gate_up_bias = joint._parameters["bias"]
    try:
        return _gated_mlp(x, gate_up, gate_up_bias, weight, bias, activation)
    except REFUSED:
        return None


_rotate_heads = op("rotate_heads")
_gated_mlp: Callable[..., Tensor] = op("gated_mlp")
