"""Masks, groups and packing of the attention ops."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from opgraft import CustomOp
from opgraft.ops import MMEncoderAttention, ScaledDotProductAttention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

HEADS, KEY_HEADS, SIZE = 4, 2, 6
LENGTHS = (3, 0, 5, 1, 5)
TOKENS = sum(LENGTHS)
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def qkv(
    batch: int, tokens: int, heads: int = KEY_HEADS, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    return [torch.randn(batch, tokens, n, SIZE).to(dtype) for n in (HEADS, heads, heads)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "boolean mask": {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu()},
    "additive mask": {"attn_mask": torch.arange(49.0).reshape(7, 7) / 49},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "no dropout": {"dropout_p": 0.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("enable_gqa", [False, True])
def test_bits_of_torch(options: dict[str, Any], enable_gqa: bool) -> None:
    """Every option reaches torch's function, by keyword and by position."""
    tensors = [x.transpose(1, 2) for x in qkv(2, 7, KEY_HEADS if enable_gqa else HEADS)]
    expected = F.scaled_dot_product_attention(*tensors, **options, enable_gqa=enable_gqa)
    assert torch.equal(
        ScaledDotProductAttention()(*tensors, **options, enable_gqa=enable_gqa), expected
    )
    positional = [
        options.get("attn_mask"),
        options.get("dropout_p", 0.0),
        options.get("is_causal", False),
    ]
    keywords = {"scale": options.get("scale"), "enable_gqa": enable_gqa}
    assert torch.equal(ScaledDotProductAttention()(*tensors, *positional, **keywords), expected)


def test_dropout() -> None:
    """Dropout draws from torch's generator as torch's function does."""
    tensors = [x.transpose(1, 2) for x in qkv(2, 7, HEADS)]
    torch.manual_seed(1)
    expected = F.scaled_dot_product_attention(*tensors, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(ScaledDotProductAttention()(*tensors, dropout_p=0.5), expected)


@pytest.mark.parametrize("split", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("packed", [False, True])
def test_layouts_agree(split: tuple[bool, bool], packed: bool) -> None:
    """Heads split or flattened, for query and key apart: the values are the same, in the shape form of the query."""
    op = MMEncoderAttention(HEADS, SIZE, num_kv_heads=KEY_HEADS)
    query, key, value = qkv(1, TOKENS)
    bounds = BOUNDS if packed else None
    q, k, v = (
        x if s else x.flatten(2)
        for x, s in zip((query, key, value), (*split, split[1]), strict=True)
    )
    got = op(q, k, v, bounds)
    assert got.shape == q.shape
    assert torch.equal(got.reshape(query.shape), op(query, key, value, bounds))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_sequences_are_apart(dtype: torch.dtype, batch: int) -> None:
    """Each packed sequence is attended as if it were alone, empty ones too, counting tokens through batch rows."""
    op = MMEncoderAttention(HEADS, SIZE, num_kv_heads=KEY_HEADS)
    tensors = qkv(batch, TOKENS // batch, dtype=dtype)
    got = op(
        *tensors,
        cu_seqlens=BOUNDS,
        max_seqlen=torch.tensor(5),
        sequence_lengths=torch.tensor(LENGTHS),
    )
    flat = [x.flatten(0, 1) for x in tensors]
    for start, end in pairwise(BOUNDS):
        alone = op(*(x[None, start:end] for x in flat))[0]
        torch.testing.assert_close(got.flatten(0, 1)[start:end], alone)


def test_packing_compiles() -> None:
    """Compiled without a graph break, other lengths give other blocks of the same graph."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    op = MMEncoderAttention(HEADS, SIZE, num_kv_heads=KEY_HEADS)
    compiled = torch.compile(op, backend=backend, fullgraph=True, dynamic=True)
    tensors = qkv(1, TOKENS)
    for bounds in (BOUNDS, torch.tensor([0, 1, 2, 4, 7, TOKENS], dtype=torch.int32)):
        torch.testing.assert_close(compiled(*tensors, bounds), op(*tensors, bounds))
    assert len(graphs) == 1


def test_fake_lengths() -> None:
    """Fake tensors and those of ``meta`` have no lengths to check or to loop over: packing gives the right shape."""
    op = MMEncoderAttention(HEADS, SIZE, num_kv_heads=KEY_HEADS)
    tensors = [x.to("meta") for x in qkv(1, TOKENS)]
    assert op(*tensors, BOUNDS.to("meta")).shape == (1, TOKENS, HEADS, SIZE)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = [mode.from_tensor(x) for x in (*qkv(1, TOKENS), BOUNDS)]
        assert op(*fake).shape == (1, TOKENS, HEADS, SIZE)


def test_padded_rows() -> None:
    """Each row of a padded batch is attended as if it were cut to its length; the rest is zero, whatever was there."""
    op = MMEncoderAttention(HEADS, SIZE, num_kv_heads=KEY_HEADS)
    lengths = torch.tensor([3, 0, 7])
    tensors = qkv(3, 7)
    got = op(*tensors, sequence_lengths=lengths)
    for row, length in enumerate(lengths):
        alone = op(*(x[row, None, :length] for x in tensors))[0]
        torch.testing.assert_close(got[row, :length], alone)
        assert not got[row, length:].any()
    leaves = [x.requires_grad_() for x in tensors]
    assert all(
        g.isfinite().all()
        for g in torch.autograd.grad(op(*leaves, sequence_lengths=lengths).sum(), leaves)
    )


def test_scale() -> None:
    """The scale defaults to the inverse root of the head size, and another one is used as given."""
    assert MMEncoderAttention(HEADS, 16).scale == 0.25
    op = MMEncoderAttention(HEADS, SIZE, 0.5)
    tensors = qkv(2, 7, HEADS)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors), scale=0.5
    ).transpose(1, 2)
    assert torch.equal(op(*tensors), expected)


def test_mixed_dtypes_under_autocast() -> None:
    """Under autocast dtypes may differ, as torch's function then brings them to one."""
    query, key, value = (x.transpose(1, 2) for x in qkv(2, 7, HEADS))
    op = ScaledDotProductAttention()
    with torch.autocast("cpu", torch.bfloat16):
        got = op(query, key, value.bfloat16())
        assert torch.equal(got, F.scaled_dot_product_attention(query, key, value.bfloat16()))
        compiled = torch.compile(op, backend="eager", fullgraph=True)
        assert torch.equal(compiled(query, key, value.bfloat16()), got)
    with pytest.raises(
        ValueError, match=r"value is torch\.bfloat16, expected torch\.float32 as query"
    ):
        op(query, key, value.bfloat16())


def test_dropout_has_no_registered_backward() -> None:
    """The registered op's backward computes the result again, so that it refuses dropout; without, it has gradients."""
    tensors = [x.transpose(1, 2).requires_grad_() for x in qkv(2, 7, HEADS)]
    registered = torch.ops.opgraft.scaled_dot_product_attention
    got = torch.autograd.grad(registered(*tensors).sum(), tensors)
    torch.testing.assert_close(
        got, torch.autograd.grad(F.scaled_dot_product_attention(*tensors).sum(), tensors)
    )
    with pytest.raises(
        ValueError, match=r"scaled_dot_product_attention: dropout_p is 0\.5, expected 0 where"
    ):
        registered(*tensors, None, 0.5)
    with torch.no_grad():
        assert registered(*tensors, None, 0.5).shape == tensors[0].shape


def test_what_an_encoder_prepares() -> None:
    """Without a replacement an encoder gets its bounds on the device and no lengths; a replacement answers both."""
    bounds = [0, 3, 8]
    assert MMEncoderAttention.maybe_compute_seq_lens("any", bounds, "cpu") is None
    got = MMEncoderAttention.maybe_recompute_cu_seqlens("any", BOUNDS, 24, 1, "meta")
    assert (got.device.type, got.shape, got.dtype) == ("meta", BOUNDS.shape, BOUNDS.dtype)
    assert (
        MMEncoderAttention.maybe_recompute_cu_seqlens("any", bounds, 24, 1, "cpu").tolist()
        == bounds
    )

    class Kernel(MMEncoderAttention):
        @classmethod
        def maybe_compute_seq_lens(
            cls, attn_backend: object, cu_seqlens: Any, device: Any
        ) -> torch.Tensor:
            return torch.as_tensor(cu_seqlens, device=device).diff()

        @classmethod
        def maybe_recompute_cu_seqlens(
            cls, *args: Any, fp8_padded_hidden_size: int | None = None
        ) -> torch.Tensor:
            return super().maybe_recompute_cu_seqlens(*args) * (fp8_padded_hidden_size or 0)

    CustomOp.register_oot("MMEncoderAttention")(Kernel)
    for asked in (MMEncoderAttention, Kernel, MMEncoderAttention(HEADS, SIZE)):
        lengths = asked.maybe_compute_seq_lens("any", bounds, "cpu")
        assert lengths is not None
        assert lengths.tolist() == [3, 5]
        assert asked.maybe_recompute_cu_seqlens(
            "any", bounds, 24, 1, "cpu", fp8_padded_hidden_size=2
        ).tolist() == [
            0,
            6,
            16,
        ]


def test_attributes() -> None:
    """Kernels of plugins read the geometry and the layer's path from the op."""
    op = MMEncoderAttention(HEADS, SIZE, prefix="visual.blocks.0.attn", multimodal_config={"mm": 1})
    assert (op.num_heads, op.head_size, op.num_kv_heads) == (HEADS, SIZE, HEADS)
    assert (op.prefix, op.multimodal_config) == ("visual.blocks.0.attn", {"mm": 1})
    assert "num_kv_heads=4" in repr(op)
