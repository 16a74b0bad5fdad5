"""Specs of the activations. Each reference follows the formula of a paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from opgraft.ops import activation as ops
from opgraft.ops.activation import functional
from opgraft.ops.spec import Arguments, Draw, OpSpec, Outside, of_transformers, with_parameters
from torch import Tensor, nn
from torch.nn import functional as F

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        below: Tensor = torch.special.ndtr(x)
        return x * below
    inner = SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)
    return x / (1 + torch.exp(-2 * inner))


def _one_input(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, size)}


def _gated_input(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, 2 * size)}


def _wide(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    """Draw values beyond the limits of the clipped gates."""
    return {"x": draw(*lead, 2 * size) * 4}


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    *lead, width = x.shape
    halves = x.reshape(*lead, 2, width // 2)
    first, second = halves.unbind(-2)
    return first, second


def _sparse(x: Tensor, activation_sparsity: float, approximate: str = "none") -> Tensor:
    gate, up = _split(x)
    size = gate.shape[-1]
    mean = gate.sum(-1, keepdim=True) / size
    squares = (gate - mean) ** 2
    variance = squares.sum(-1, keepdim=True) / size

    sparsity = torch.tensor(activation_sparsity, dtype=torch.float64)
    quantile = torch.special.ndtri(sparsity)
    cut = mean + torch.sqrt(variance) * quantile
    kept = torch.where(gate > cut, gate - cut, torch.zeros_like(gate))
    return gelu(kept, approximate) * up


def _swigluoai(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    *lead, width = x.shape
    pairs = x.reshape(*lead, width // 2, 2)
    gate, up = pairs.unbind(-1)

    # A tensor as the bound, because torch.minimum takes no number.
    most = torch.tensor(limit, dtype=x.dtype)
    gate = torch.minimum(gate, most)
    up = torch.minimum(up, most)
    up = torch.maximum(up, -most)
    return (up + 1) * silu(alpha * gate) / alpha


def _clipped(up: Tensor, limit: float) -> Tensor:
    return torch.where(up.abs() > limit, limit * up.sign(), up)


def _clamp(x: Tensor, limit: float) -> Tensor:
    gate, up = _split(x)
    gate = torch.where(gate > limit, limit, gate)
    return silu(gate) * _clipped(up, limit)


def _step(x: Tensor, limit: float = 7.0) -> Tensor:
    gate, up = _split(x)
    activated = silu(gate)
    activated = torch.where(activated > limit, limit, activated)
    return activated * _clipped(up, limit)


def _fatrelu(x: Tensor, threshold: float = 0.0) -> Tensor:
    gate, up = _split(x)
    kept = (gate > threshold) * gate
    return kept * up


def _xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    positive = torch.log1p(torch.exp(alpha_p))
    negative = beta + torch.log1p(torch.exp(alpha_n))

    bounded = torch.where(x < eps, x, eps)
    exponential = torch.exp(bounded) - 1
    below = negative * (exponential - x) + beta * x
    above = positive * x**2 + beta * x
    return torch.where(x > 0, above, below)


def _xielu_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, size), "alpha_p": draw(1), "alpha_n": draw(1)}


def _activation_op(
    build: Callable[..., nn.Module],
) -> Callable[..., tuple[nn.Module, tuple[Any, ...]]]:
    """Build the module of an activation from the settings, and call the module with ``x``."""
    return lambda x, **settings: (build(**settings), (x,))


def _xielu_op(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> tuple[nn.Module, tuple[Any, ...]]:
    module = with_parameters(ops.XIELU(), alpha_p=alpha_p, alpha_n=alpha_n)
    return module, (x,)


def _torch_gated(activation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, **settings: Any) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate, **settings) * up

    return call


def _mul_and_silu(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return first * F.silu(second)


def _gemma3n(mlp: Any, x: Tensor, activation_sparsity: float, approximate: str = "none") -> Tensor:
    gate, up = x.chunk(2, -1)
    # The class needs a whole configuration, its method only this setting.
    setting = SimpleNamespace(activation_sparsity=activation_sparsity)
    kept = mlp._gaussian_topk(setting, gate)
    return F.gelu(kept, approximate=approximate) * up


def _gate_of_experts(experts: Any, x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Any:
    # The class needs weights of experts, its method only these settings.
    settings = SimpleNamespace(alpha=alpha, limit=limit, act_fn=F.silu)
    return experts._apply_gate(settings, x)


def _transformers_xielu(activation: Any, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Any:
    parameters = {"alpha_p": alpha_p, "alpha_n": alpha_n}
    module = activation(dtype=x.dtype)
    return torch.func.functional_call(module, parameters, (x,))


def _per_element(count: int) -> Callable[..., int]:
    return lambda x, **others: count * x.numel()


APPROXIMATE: dict[str, Arguments] = {"": {}, "tanh": {"approximate": "tanh"}}
SPARSE: dict[str, Arguments] = {
    "": {"activation_sparsity": 0.7},
    "tanh": {"activation_sparsity": 0.95, "approximate": "tanh"},
}
GATED: dict[str, Any] = {
    "inputs": _gated_input,
    "flops": _per_element(3),
    "large": (((83,), 512), ((7,), 13824)),
}
PLAIN: dict[str, Any] = {"inputs": _one_input, "flops": _per_element(8)}
F_SILU = Outside("torch.nn.functional.silu", _torch_gated(F.silu))
F_GELU = Outside("torch.nn.functional.gelu", _torch_gated(F.gelu))
F_GELU_TANH = Outside("torch.nn.functional.gelu", lambda x: F.gelu(x, approximate="tanh"))

SPECS = (
    OpSpec(
        functional.silu_and_mul,
        reference=lambda x: silu(_split(x)[0]) * _split(x)[1],
        module=_activation_op(ops.SiluAndMul),
        outside=(F_SILU,),
        **GATED,
    ),
    OpSpec(
        functional.mul_and_silu,
        reference=lambda x: _split(x)[0] * silu(_split(x)[1]),
        module=_activation_op(ops.MulAndSilu),
        outside=(Outside("torch.nn.functional.silu", _mul_and_silu),),
        **GATED,
    ),
    OpSpec(
        functional.gelu_and_mul,
        reference=lambda x, approximate="none": gelu(_split(x)[0], approximate) * _split(x)[1],
        module=_activation_op(ops.GeluAndMul),
        variants=APPROXIMATE,
        outside=(F_GELU,),
        **GATED,
    ),
    OpSpec(
        functional.gelu_and_mul_sparse,
        reference=_sparse,
        module=_activation_op(ops.GeluAndMulSparse),
        variants=SPARSE,
        outside=(of_transformers("models.gemma3n.modeling_gemma3n.Gemma3nTextMLP", _gemma3n),),
        **GATED,
    ),
    OpSpec(
        functional.fatrelu_and_mul,
        reference=_fatrelu,
        module=_activation_op(ops.FatreluAndMul),
        variants={"": {}, "threshold": {"threshold": 0.25}},
        **GATED,
    ),
    OpSpec(
        functional.swigluoai_and_mul,
        reference=_swigluoai,
        module=_activation_op(ops.SwigluOAIAndMul),
        variants={"": {}, "other limits": {"alpha": 1.3, "limit": 2.5}},
        outside=(
            of_transformers("models.gpt_oss.modeling_gpt_oss.GptOssExperts", _gate_of_experts),
        ),
        **{**GATED, "inputs": _wide},
    ),
    OpSpec(
        functional.silu_and_mul_with_clamp,
        reference=_clamp,
        module=lambda x, limit: (ops.SiluAndMulWithClamp(limit), (x,)),
        variants={"": {"limit": 3.0}},
        outside=(
            of_transformers(
                "models.deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts", _gate_of_experts
            ),
        ),
        **{**GATED, "inputs": _wide},
    ),
    OpSpec(
        functional.swiglustep_and_mul,
        reference=_step,
        module=_activation_op(ops.SwigluStepAndMul),
        variants={"": {}, "other limit": {"limit": 2.5}},
        outside=(
            of_transformers("models.step3p7.modeling_step3p7.Step3p7Experts", _gate_of_experts),
        ),
        **{**GATED, "inputs": _wide},
    ),
    OpSpec(
        functional.gelu,
        reference=gelu,
        module=_activation_op(ops.GELU),
        variants=APPROXIMATE,
        outside=(
            Outside(
                "torch.nn.functional.gelu",
                lambda x, approximate="none": F.gelu(x, approximate=approximate),
            ),
        ),
        **PLAIN,
    ),
    OpSpec(
        functional.gelu_tanh,
        reference=lambda x: gelu(x, "tanh"),
        module=_activation_op(ops.GELUTanh),
        outside=(F_GELU_TANH,),
        **PLAIN,
    ),
    OpSpec(
        functional.gelu_new,
        reference=lambda x: gelu(x, "tanh"),
        module=_activation_op(ops.NewGELU),
        outside=(F_GELU_TANH,),
        **PLAIN,
    ),
    OpSpec(
        functional.gelu_fast,
        reference=lambda x: gelu(x, "tanh"),
        module=_activation_op(ops.FastGELU),
        outside=(F_GELU_TANH,),
        **PLAIN,
    ),
    OpSpec(
        functional.quick_gelu,
        reference=lambda x: silu(1.702 * x) / 1.702,
        module=_activation_op(ops.QuickGELU),
        outside=(
            of_transformers(
                "activations.QuickGELUActivation", lambda activation, x: activation()(x)
            ),
        ),
        **PLAIN,
    ),
    OpSpec(
        functional.silu,
        reference=silu,
        module=_activation_op(ops.SiLU),
        outside=(Outside("torch.nn.functional.silu", lambda x: F.silu(x)),),
        **PLAIN,
    ),
    OpSpec(
        functional.silu_, reference=silu, module=lambda x: (ops.SiLU(inplace=True), (x,)), **PLAIN
    ),
    OpSpec(
        functional.relu,
        reference=lambda x: (x > 0) * x,
        module=_activation_op(ops.ReLU),
        outside=(Outside("torch.nn.functional.relu", lambda x: F.relu(x)),),
        **PLAIN,
    ),
    OpSpec(
        functional.relu2,
        reference=lambda x: (x > 0) * x * x,
        module=_activation_op(ops.ReLUSquaredActivation),
        outside=(
            of_transformers(
                "activations.ReLUSquaredActivation", lambda activation, x: activation()(x)
            ),
        ),
        **PLAIN,
    ),
    OpSpec(
        functional.xielu,
        inputs=_xielu_inputs,
        reference=_xielu,
        flops=_per_element(8),
        module=_xielu_op,
        outside=(of_transformers("activations.XIELUActivation", _transformers_xielu),),
    ),
)
