"""Kernels without a backward, where ``torch.func`` or forward-mode differentiation asks for tangents."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import opgraft
import pytest
import torch
from opgraft import CustomOp, functional
from opgraft.ops import ReLUSquaredActivation
from torch import Tensor
from torch.autograd import forward_ad

# Torch compiles its forward-mode rules by torch.jit.script, of which it warns.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


class Squared(CustomOp):
    """Its kernel drops derivatives, as one that is not made of torch's operators does."""

    def forward_native(self, x: Tensor) -> Tensor:
        return x * x

    @opgraft.inference_only
    def forward_cpu(self, x: Tensor) -> Tensor:
        return (x * x).detach() + 100


def as_module() -> Callable[[Tensor], Tensor]:
    return Squared()


def dropping(x: Tensor) -> Tensor:
    return (x * x).detach() + 100


def as_form() -> Callable[[Tensor], Tensor]:
    @ReLUSquaredActivation.register_oot
    class Dropping(ReLUSquaredActivation):
        @opgraft.inference_only
        def forward_oot(self, x: Tensor) -> Tensor:
            return dropping(x)

        functional_oot: ClassVar[dict[str, Callable[..., Tensor]]] = {"relu2": dropping}

    return lambda x: functional.relu2(x.abs())


each_call = pytest.mark.parametrize("make", [as_module, as_form])
each_mode = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])


@each_call
@each_mode
def test_dual_numbers_keep_their_tangents(
    make: Callable[[], Callable[[Tensor], Tensor]], mode: type
) -> None:
    """Forward-mode differentiation goes by the native definition, without gradients too, and ends with its level."""
    call, x, v = make(), torch.randn(5), torch.randn(5)
    with mode(), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(x, v))).tangent
        torch.testing.assert_close(tangent, 2 * x * v)
    with mode():
        torch.testing.assert_close(call(x), x * x + 100)


@each_call
@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.jacrev])
@each_mode
def test_transforms_of_functions(
    make: Callable[[], Callable[[Tensor], Tensor]],
    transform: Callable[..., Callable[[Tensor], Tensor]],
    mode: type,
) -> None:
    """``torch.func`` sees the native definition."""
    x = torch.randn(5)
    with mode():
        torch.testing.assert_close(transform(make())(x), torch.diag(2 * x))


def test_compiled_transforms() -> None:
    """A transform that is compiled sees the native definition; what is compiled without one runs the kernel."""
    op, x = Squared(), torch.randn(5)
    compiled = torch.compile(torch.func.jacfwd(op), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.diag(2 * x))
    torch.testing.assert_close(torch.compile(op, backend="eager", fullgraph=True)(x), x * x + 100)
