"""Linear layers whose weight lies the other way round, and ReLU."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from opgraft import graft, ungraft
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
pytest.importorskip("transformers")

from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D


def conv1d(dtype: torch.dtype = torch.float32) -> Conv1D:
    torch.manual_seed(0)
    layer = Conv1D(5, 7)
    nn.init.normal_(layer.bias)
    return layer.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_linear_layer_of_gpt2(dtype: torch.dtype) -> None:
    """It becomes an op over the same parameter, in its own layout, with the same results and gradients."""
    model = nn.Sequential(conv1d(dtype))
    module, weight = model[0], model[0].weight
    inputs = [
        torch.randn(*shape, 7, dtype=dtype, requires_grad=True)
        for shape in ((3,), (2, 3), (1, 2, 3), (0,))
    ]
    expected = [model(x) for x in inputs]
    gradients = [torch.autograd.grad(model(x).sum(), (x, *module.parameters())) for x in inputs]
    (row,) = graft(model).replaced
    assert (row.op, row.source) == ("transposed_linear", "Conv1D")
    assert model[0].weight is weight
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        "0.weight": (7, 5),
        "0.bias": (5,),
    }
    for x, wanted, gradient in zip(inputs, expected, gradients, strict=True):
        torch.testing.assert_close(model(x), wanted)
        torch.testing.assert_close(
            torch.autograd.grad(model(x).sum(), (x, *model[0].parameters())), gradient
        )
    ungraft(model)
    assert model[0] is module
    assert all(torch.equal(model(x), wanted) for x, wanted in zip(inputs, expected, strict=True))


class Twice(Conv1D):
    """The layer with one operation more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class TheOtherWay(nn.Module):
    """A square layer that transposes its weight once more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 4), self.weight.t()).view(x.shape)


class WithoutBias(Conv1D):
    """The layer that forgets its bias."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class OtherwiseForOneToken(Conv1D):
    """The layer with one operation more where it is given a single token."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out.clamp(-0.1, 0.1) if x.shape[-2:-1] == (1,) else out


class OtherwiseForManyTokens(Conv1D):
    """The layer with one operation more where it is given much at once."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out.clamp(-0.1, 0.1) if x.numel() > 100_000 else out


class OtherwiseForFourDimensions(Conv1D):
    """The layer with one operation more where it is given four dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out.clamp(-0.1, 0.1) if x.dim() == 4 else out


@pytest.mark.parametrize(
    "make",
    [
        lambda: Twice(5, 7),
        TheOtherWay,
        lambda: WithoutBias(5, 7),
        lambda: OtherwiseForOneToken(5, 7),
        lambda: OtherwiseForManyTokens(5, 7),
        lambda: OtherwiseForFourDimensions(5, 7),
    ],
)
def test_what_is_nearly_such_a_layer_stays(make: Callable[[], nn.Module]) -> None:
    """One other operation, and the module is left alone."""
    module = make()
    model = nn.Sequential(module)
    assert graft(model).replaced == ()
    assert model[0] is module


class OfThreeDimensions(Conv1D):
    """The layer for batches of sequences only."""

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        out: Tensor = super().forward(x.reshape(batch * sequence, -1)).view(batch, sequence, -1)
        return out


def test_a_layer_that_takes_fewer_shapes_than_the_op() -> None:
    """Where a module raises it has nothing to agree on."""
    model, x = nn.Sequential(OfThreeDimensions(5, 7)), torch.randn(2, 3, 7)
    expected = model(x)
    assert len(graft(model).replaced) == 1
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ("module", "op"),
    [
        (nn.ReLU(), "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (ACT2FN["relu"], "relu"),
        (ACT2FN["relu2"], "relu2"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_relu(module: nn.Module, op: str, dtype: torch.dtype) -> None:
    """ReLU and its square become ops, in place where the module was."""
    model, x = nn.Sequential(module), torch.randn(3, 5).to(dtype)
    expected, written = model(x.clone()), x.clone()
    assert [row.op for row in graft(model).replaced] == [op]
    out = model(written)
    torch.testing.assert_close(out, expected)
    assert (out.data_ptr() == written.data_ptr()) is getattr(module, "inplace", False)
    ungraft(model)
    assert model[0] is module


def test_what_is_nearly_relu_stays() -> None:
    """Other rectifiers are none."""
    model = nn.Sequential(nn.ReLU6(), nn.LeakyReLU(), nn.ELU(), ACT2FN["relu6"])
    assert graft(model).replaced == ()
