"""The activation with learnt parameters. The functional form ``xielu`` has the maths."""

from __future__ import annotations

import math
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.activation.modules import TRITON
from torch import Tensor, nn

__all__ = ["XIELU"]


@CustomOp.register("xielu")
class XIELU(CustomOp):
    """The expanded integral of the exponential linear unit (Huang and Schlag, arXiv:2411.13010).

    Args:
        alpha_p_init: the coefficient of positive inputs. ``alpha_p`` stores the inverse softplus.
        alpha_n_init: the coefficient of negative inputs plus ``beta``. ``alpha_n`` stores the
            inverse softplus of the coefficient.
        beta: the slope at zero.
        eps: upper bound of the argument of the exponential, a small negative number.
        dtype: dtype of the parameters.
        with_vector_loads: kept for kernels that load several elements at once.

    Raises:
        ValueError: ``alpha_p_init`` is not positive, or ``alpha_n_init`` is not above ``beta``.
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
        alpha_p = _inverse_softplus("alpha_p_init", alpha_p_init, dtype)
        alpha_n = _inverse_softplus("alpha_n_init - beta", alpha_n_init - beta, dtype)

        self.alpha_p = nn.Parameter(alpha_p)
        self.alpha_n = nn.Parameter(alpha_n)
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
    inverse = math.log(math.expm1(value))
    return torch.tensor([inverse], dtype=dtype)
