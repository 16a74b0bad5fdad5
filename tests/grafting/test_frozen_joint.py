"""Gate and up of a frozen gated MLP: one copy serves both, as long as it is right."""

from __future__ import annotations

import copy

import opgraft
import pytest
import torch
import torch.nn.functional as F
from opgraft.compat import packed_linear as onednn
from opgraft.ops import GatedMLP
from opgraft.ops.linear import packed as packed_linear

pytestmark = pytest.mark.skipif(bool(onednn.missing()), reason=f"packed linear: {onednn.missing()}")


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each weight had that was packed; packing pays always."""
    made: list[int] = []
    real = onednn.pack
    monkeypatch.setattr(onednn, "pack", lambda weight: made.append(len(weight)) or real(weight))
    rows = {torch.float32: (packed_linear.RowRange(1, 1),)}
    monkeypatch.setattr(packed_linear, "PACKED", dict.fromkeys(packed_linear.PACKED, rows))
    monkeypatch.setattr(packed_linear, "ranges_for", packed_linear.ranges_for.__wrapped__)
    monkeypatch.setattr(packed_linear._COPIES, "after", 0)
    return made


@torch.no_grad()
def agrees(layer: GatedMLP, x: torch.Tensor) -> None:
    gate, up, down = (layer.get_submodule(name).weight for name in (*layer.joined, "down_proj"))
    expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


def test_one_copy_for_both(packed: list[int]) -> None:
    """It is kept once frozen, dropped when one of the two is trained, and made anew when they are frozen again."""
    layer, x = GatedMLP(32, 48).eval(), torch.randn(3, 32)
    layer.join()
    agrees(layer, x)
    assert packed == []
    opgraft.freeze(layer)
    agrees(layer, x)
    agrees(layer, x)
    assert packed == [96, 32]
    layer.requires_grad_(True)
    optimizer = torch.optim.AdamW([layer.up_proj.weight], lr=0.01, fused=True)
    layer(x).square().sum().backward()
    optimizer.step()
    layer.requires_grad_(False)
    agrees(layer, x)
    assert packed == [96, 32]
    opgraft.freeze(layer)
    agrees(layer, x)
    assert packed == [96, 32, 96, 32]


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_refresh_of_either(packed: list[int], name: str) -> None:
    """A write through ``.data`` to one of the two is told by ``refresh`` of that one."""
    layer, x = GatedMLP(32, 48).eval(), torch.randn(3, 32)
    layer.join()
    opgraft.freeze(layer)
    agrees(layer, x)
    weight = layer.get_submodule(name).weight
    assert isinstance(weight, torch.Tensor)
    weight.data.mul_(3)
    opgraft.refresh(weight)
    agrees(layer, x)
    agrees(copy.deepcopy(layer), x)


def test_loading_again_and_again_keeps_one_copy(packed: list[int]) -> None:
    """Gate and up are joined anew by each load, over the same memory, and the copy of before makes room."""
    layer, x, before = GatedMLP(32, 48).eval(), torch.randn(3, 32), {*packed_linear._COPIES}
    layer.join()
    opgraft.freeze(layer)
    for _ in range(4):
        layer.load_state_dict({name: tensor * 0.9 for name, tensor in layer.state_dict().items()})
        agrees(layer, x)
        assert len({*packed_linear._COPIES} - before) == 2
