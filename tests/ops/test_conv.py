"""What is particular to the convolutions: torch's modules in all settings, and the matrix product for patches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import functional
from opgraft.ops import Conv2dLayer, Conv3dLayer
from torch import Tensor, nn

PAIRS = [(Conv2dLayer, nn.Conv2d, (9, 11)), (Conv3dLayer, nn.Conv3d, (7, 8, 9))]
pairs = pytest.mark.parametrize(("ours", "torchs", "sizes"), PAIRS, ids=["2d", "3d"])
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "no bias": {"kernel_size": 3, "bias": False},
    "valid": {"kernel_size": 2, "padding": "valid", "stride": 2},
    "same": {"kernel_size": 3, "padding": "same"},
    "same, even kernel": {"kernel_size": 4, "padding": "same"},
    "same, dilation": {"kernel_size": 2, "dilation": 3, "padding": "same"},
    "stride, padding": {"kernel_size": 3, "stride": 2, "padding": 2},
    "dilation": {"kernel_size": 2, "dilation": 3},
    "groups": {"kernel_size": 3, "groups": 2, "padding": 1},
    "depthwise": {"kernel_size": 3, "groups": 4},
    "patches": {"kernel_size": 2, "stride": 2},
    "patches, dilation": {"kernel_size": 2, "stride": 2, "dilation": 2},
    "patches, groups": {"kernel_size": 2, "stride": 2, "groups": 2},
    "patches, padding": {"kernel_size": 2, "stride": 2, "padding": 1},
    "one by one": {"kernel_size": 1},
    "reflect": {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"},
    "replicate": {"kernel_size": 3, "padding": 2, "padding_mode": "replicate", "stride": 2},
    "circular": {"kernel_size": 3, "padding": 2, "padding_mode": "circular"},
    "same, reflect": {"kernel_size": 4, "padding": "same", "padding_mode": "reflect"},
}
settings = pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)


@pairs
@settings
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_drop_in(ours: Any, torchs: Any, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    """Built by the same arguments and with the same state, both compute the same, gradients included."""
    op, theirs = ours(4, 8, **options), torchs(4, 8, **options)
    theirs.load_state_dict(op.state_dict())
    x = torch.randn(3, 4, *sizes, requires_grad=True)
    y, expected = op(x), theirs(x)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(expected)
    mine = torch.autograd.grad(y, [x, *op.parameters()], upstream)
    others = torch.autograd.grad(expected, [x, *theirs.parameters()], upstream)
    torch.testing.assert_close(mine, others, atol=1e-4, rtol=1e-4)


@pairs
def test_initial_values_are_torchs(ours: Any, torchs: Any, sizes: tuple[int, ...]) -> None:
    """From one seed come the same weights."""
    states = []
    for cls in (ours, torchs):
        torch.manual_seed(7)
        states.append(cls(3, 5, 2).state_dict())
    assert [(name, value.tolist()) for name, value in states[0].items()] == [
        (name, value.tolist()) for name, value in states[1].items()
    ]


@pairs
@settings
def test_the_matrix_product_is_taken_where_it_is_right(
    ours: Any,
    torchs: Any,
    sizes: tuple[int, ...],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels side by side, seeing all channels of an unpadded input, are one matrix product; no others are."""
    op = ours(4, 8, **options)
    assert op.enable_linear == any(
        options is SETTINGS[name] for name in ("valid", "patches", "one by one")
    )
    taken = []
    for name in ("_forward_conv", "_forward_mulmat"):
        real = getattr(ours, name)
        monkeypatch.setattr(
            ours, name, lambda self, x, n=name, f=real: (taken.append(n), f(self, x))[1]
        )
    op(torch.randn(2, 4, *sizes))
    assert taken == ["_forward_mulmat" if op.enable_linear else "_forward_conv"]


@pairs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_both_ways_agree(
    ours: Any, torchs: Any, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """What is left behind the last whole patch is not read, whichever way is taken."""
    op = ours(4, 6, 2, 2, params_dtype=dtype)
    x = torch.randn(2, 4, *sizes, dtype=dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(
        op._forward_mulmat(x), op._forward_conv(x), atol=tolerance, rtol=tolerance
    )
    assert op._forward_mulmat(x).shape[2:] == tuple(size // 2 for size in sizes)


@pairs
def test_attributes(ours: Any, torchs: Any, sizes: tuple[int, ...]) -> None:
    """Kernels find sizes as tuples and the length of a row of the matrix product; parameters have the given dtype."""
    dims = len(sizes)
    op = ours(3, 5, 4, 4, params_dtype=torch.bfloat16)
    assert (op.in_channels, op.out_channels, op.kernel_size) == (3, 5, (4,) * dims)
    assert (op.input_size, op.enable_linear, op.groups, op.padding_mode) == (
        3 * 4**dims,
        True,
        1,
        "zeros",
    )
    assert {p.dtype for p in op.parameters()} == {torch.bfloat16}
    assert isinstance(op, torchs)
    assert ours(3, 5, 4, bias=False).bias is None


@pairs
def test_copies(ours: Any, torchs: Any, sizes: tuple[int, ...]) -> None:
    """Copies and unpickled ops compute the same."""
    op, x = ours(4, 6, 3, padding="same", padding_mode="circular"), torch.randn(1, 4, *sizes)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):  # noqa: S301  # our own bytes
        assert torch.equal(twin(x), op(x))


@pairs
def test_memory_formats(ours: Any, torchs: Any, sizes: tuple[int, ...]) -> None:
    """Inputs with their channels last in memory, and expanded ones, give the same."""
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    x = torch.randn(2, 4, *sizes)
    for options in (SETTINGS["patches"], SETTINGS["circular"]):
        op = ours(4, 6, **options)
        last = x.to(memory_format=formats[len(sizes)])
        torch.testing.assert_close(op(last), op(x), atol=1e-5, rtol=1e-5)
        expanded = x[:1, :1].expand(3, 4, *sizes)
        torch.testing.assert_close(op(expanded), op(expanded.contiguous()), atol=1e-5, rtol=1e-5)


def test_padding_of_each_end() -> None:
    """The functional forms take two numbers per dimension, before and after it."""
    x, weight = torch.randn(1, 1, 4, 5), torch.randn(1, 1, 2, 2)
    y = functional.conv2d(x, weight, None, None, [1, 0, 0, 2])
    torch.testing.assert_close(y, nn.functional.conv2d(nn.functional.pad(x, (0, 2, 1, 0)), weight))


def t(*shape: int) -> Tensor:
    return torch.zeros(shape)


two, three = functional.conv2d, functional.conv3d
BAD: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: Conv2dLayer(2, 2, 3, 2, "same"),
        r"conv2d: stride is \(2, 2\), expected 1 with padding 'same'",
    ),
    (
        lambda: Conv3dLayer(2, 2, 3, (1, 1, 2), "same"),
        r"conv3d: stride is \(1, 1, 2\), expected 1 with padding 'same'",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3, 1, "full"),
        "conv2d: padding is 'full', expected 'same', 'valid' or numbers",
    ),
    (
        lambda: Conv2dLayer(2, 2, (3, 3, 3)),
        r"conv2d: kernel_size is \(3, 3, 3\), .* expected 2 numbers each",
    ),
    (
        lambda: Conv2dLayer(2, 2, (3, 3, 3), 1, "same"),
        r"conv2d: kernel_size is \(3, 3, 3\), .* expected 2 numbers",
    ),
    (
        lambda: Conv2dLayer(2, 2, 0),
        r"conv2d: kernel_size is \(0, 0\), expected 2 numbers of at least 1",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3, (1, 1, 1)),
        r"conv2d: stride is \(1, 1, 1\), expected 2 numbers of at least 1",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3, 0),
        r"conv2d: stride is \(0, 0\), expected 2 numbers of at least 1",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3, padding=-1),
        r"conv2d: padding is \(-1, -1\), expected 2 numbers of at least 0",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3, padding=(1, 1, 1, 1)),
        r"conv2d: padding is \(1, 1, 1, 1\), expected 2 numbers",
    ),
    (
        lambda: Conv3dLayer(2, 2, 3, dilation=(1, 2)),
        r"conv3d: .* dilation \(1, 2\), expected 3 numbers each",
    ),
    (lambda: Conv2dLayer(2, 2, 3, groups=0), "conv2d: groups is 0, expected a positive number"),
    (
        lambda: Conv2dLayer(3, 2, 3, groups=2),
        "conv2d: in_channels is 3, expected a positive multiple of groups=2",
    ),
    (
        lambda: Conv2dLayer(2, 3, 3, groups=2),
        "conv2d: out_channels is 3, expected a positive multiple of groups=2",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3, padding_mode="wrap"),
        "conv2d: padding_mode is 'wrap', expected one of",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3)(t(2, 5, 5)),
        r"conv2d: x has shape \(2, 5, 5\), expected \[batch, channels=2, height",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3)(t(1, 3, 5, 5)),
        r"conv2d: x has shape \(1, 3, 5, 5\), expected \[batch, channels=2",
    ),
    (
        lambda: Conv3dLayer(2, 2, 3)(t(1, 2, 5, 5)),
        r"conv3d: x has .*, expected \[batch, channels=2, time, height",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3)(t(1, 2, 5, 2)),
        r"conv2d: x has shape \(1, 2, 5, 2\), expected room for a kernel",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3, 3)(t(1, 2, 5, 2)),
        r"conv2d: x has shape \(1, 2, 5, 2\), expected room for a kernel",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3)(t(1, 2, 5, 5).half()),
        "conv2d: weight is torch.float32, expected torch.float16 as x",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3)(t(1, 2, 5, 5).to("meta")),
        "conv2d: weight is on cpu, expected meta as x",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3, padding=4, padding_mode="reflect")(t(1, 2, 9, 4)),
        r"conv2d: padding is \(4, 4\), expected at most 3 for x of shape \(1, 2, 9, 4\) with padding_mode 'reflect'",
    ),
    (
        lambda: Conv2dLayer(2, 2, 3, padding=5, padding_mode="circular")(t(1, 2, 4, 9)),
        "conv2d: padding is .* expected at most 4 for x",
    ),
    (
        lambda: two(t(1, 2, 5, 5), t(2, 2, 3)),
        r"conv2d: weight has shape \(2, 2, 3\), expected 4 dimensions",
    ),
    (
        lambda: three(t(1, 2, 5, 5, 5), t(2, 2, 3, 3)),
        r"conv3d: weight has shape \(2, 2, 3, 3\), expected 5 dimensions",
    ),
    (
        lambda: two(t(1, 2, 5, 5), t(2, 2, 3, 3), t(3)),
        r"conv2d: bias has shape \(3,\), expected \(2,\)",
    ),
    (
        lambda: two(t(1, 4, 5, 5), t(3, 2, 3, 3), groups=2),
        "conv2d: groups is 2, expected a divisor of 3 output channels",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    """A wrong argument is named, with what it is and what is expected."""
    with pytest.raises(ValueError, match=message):
        call()
