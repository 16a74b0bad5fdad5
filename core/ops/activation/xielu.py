"""The activation with learnt parameters: a module around the functional form ``xielu``, which holds the maths."""

from __future__ import annotations

import math
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.activation.modules import TRITON
from torch import Tensor, nn


@CustomOp.register("xielu")
class XIELU(CustomOp):
    """The expanded integral of the exponential linear unit (Huang and Schlag, arXiv:2411.13010).

    Args:
        alpha_p_init: the quadratic coefficient of positive inputs; stored in ``alpha_p`` by the inverse of softplus.
        alpha_n_init: that of negative inputs plus ``beta``; stored in ``alpha_n`` likewise.
        beta: the slope at zero.
        eps: upper bound of the argument of the exponential, a small negative number.
        dtype: dtype of the parameters.
        with_vector_loads: for kernels that load several elements at once; not read here.

    Raises:
        ValueError: ``alpha_p_init`` is not positive, or ``alpha_n_init`` not above ``beta``.
    """

    def __init__(
        self,
        alpha_p_init: float = 0.8,
        alpha_n_init: float = 0.8,
        beta: float = 0.5,
        eps: float = -1e-6,
        dtype: torch.dtype = torch.bfloat16,
        with_vector_loads: bool = False,
    ) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(_inverse_softplus("alpha_p_init", alpha_p_init, dtype))
        self.alpha_n = nn.Parameter(
            _inverse_softplus("alpha_n_init - beta", alpha_n_init - beta, dtype)
        )
        self.beta = beta
        self.eps = eps
        self.with_vector_loads = with_vector_loads

    @calls_functional
    def forward_native(self, input: Tensor, *, functional: Any = NATIVE) -> Tensor:
        return functional.xielu(input, self.alpha_p, self.alpha_n, self.beta, self.eps)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def extra_repr(self) -> str:
        return f"beta={self.beta}, eps={self.eps}"


def _inverse_softplus(argument: str, value: float, dtype: torch.dtype) -> Tensor:
    if value <= 0:
        raise ValueError(f"xielu: {argument} is {value}, expected a positive number")
    return torch.tensor([math.log(math.expm1(value))], dtype=dtype)
