"""Linear layers that compute a row alike, whatever rows stand beside it."""

from __future__ import annotations

import pytest
import torch
from opgraft import ops
from opgraft.compat import packed_linear
from opgraft.ops.linear import invariant


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("block", [None, 5])
def test_rows_are_alike(block: int | None, residual: bool) -> None:
    """One row, a part of a block, a block, more and none: each row has the bits that it has among many."""
    if packed_linear.missing():
        pytest.skip("nothing is packed here")
    layer = ops.RowParallelLinear(72, 48)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.requires_grad_(False)
    assert invariant.compute_rows_alike(layer) is None
    layer.quant_method.block = block
    x, others = torch.randn(2, 6, 72), torch.randn(2, 6, 48)
    given = {"residual": others} if residual else {}
    whole = layer.quant_method.apply(layer, x, layer.bias, **given)
    exact = (
        x.double() @ layer.weight.double().T
        + layer.bias.double()
        + (others.double() if residual else 0)
    )
    torch.testing.assert_close(whole.double(), exact, atol=1e-5, rtol=1e-5)
    for rows in (0, 1, 4, 5, 6):
        part = {"residual": others[:, :rows]} if residual else {}
        assert torch.equal(
            layer.quant_method.apply(layer, x[:, :rows], layer.bias, **part), whole[:, :rows]
        )


def test_rows_of_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one to three rows left over of six are summed in another order, blocks have six rows; else none do."""
    if packed_linear.missing():
        pytest.skip("nothing is packed here")
    monkeypatch.setattr(invariant, "IN_BLOCKS", {})
    compute = invariant.UnquantizedLinearMethod.apply

    def of_others(self, layer, x, bias=None, **options):
        computed = compute(self, layer, x, bias, **options)
        left = len(x) % size
        computed[len(x) - left :] += 1e-3
        return computed

    monkeypatch.setattr(invariant.UnquantizedLinearMethod, "apply", of_others)
    layer = ops.RowParallelLinear(72, 48)
    torch.nn.init.normal_(layer.weight)
    layer.requires_grad_(False)
    plain = layer.quant_method
    size = 6
    assert invariant.compute_rows_alike(layer) is None
    assert layer.quant_method.block == 6
    layer.quant_method = plain
    size = 4
    assert "in another order" in str(invariant.compute_rows_alike(layer))
    assert layer.quant_method is plain
