"""Layouts and tables of rotary embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opgraft.ops import ApplyRotaryEmb, RotaryEmbedding

HEAD_SIZE, HEADS, KEY_HEADS = 8, 5, 2


def rope(rotary_dim: int = HEAD_SIZE, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    settings = {"max_position_embeddings": 64, "base": 10000.0, "is_neox_style": True, **options}
    return RotaryEmbedding(HEAD_SIZE, rotary_dim, dtype=dtype, **settings)


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
def test_layouts_agree(is_neox_style: bool, rotary_dim: int) -> None:
    """Flattened or split heads, flattened or batched tokens: the values are the same, in the shape they came in."""
    op = rope(rotary_dim, is_neox_style=is_neox_style)
    positions = torch.randint(0, 64, (2, 7))
    query, key = torch.randn(2, 7, HEADS, HEAD_SIZE), torch.randn(2, 7, KEY_HEADS, HEAD_SIZE)
    expected = op(positions, query, key)
    for tokens, given in [((2, 7), (2, 7)), ((14,), (14,)), ((14,), (2, 7))]:
        for heads in [(-1, HEAD_SIZE), (-1,)]:
            q, k = query.reshape(*tokens, *heads), key.reshape(*tokens, *heads)
            results = op(positions.reshape(given), q, k)
            for got, argument, wanted in zip(results, (q, k), expected, strict=True):
                assert got.shape == argument.shape
                assert torch.equal(got.reshape(wanted.shape), wanted)


def test_no_key() -> None:
    """Without a key the query is rotated as it is with one, and the second result is ``None``."""
    positions, query = torch.arange(4), torch.randn(4, HEADS * HEAD_SIZE)
    rotated, key = rope()(positions, query)
    assert key is None
    assert torch.equal(rotated, rope()(positions, query, query)[1])


def test_the_rest_of_a_head_passes() -> None:
    """Elements beyond ``rotary_dim`` come out as they went in, and position 0 rotates nothing."""
    query = torch.randn(3, HEADS, HEAD_SIZE)
    rotated, _ = rope(4)(torch.tensor([0, 5, 63]), query)
    assert torch.equal(rotated[..., 4:], query[..., 4:])
    assert torch.equal(rotated[0], query[0])
    assert not torch.equal(rotated[1:, :, :4], query[1:, :, :4])


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_scores_depend_on_distance(is_neox_style: bool) -> None:
    """The dot product of a rotated query and key depends on how far apart they are and not on where (equation 16)."""
    op = rope(is_neox_style=is_neox_style, dtype=torch.float64)
    query, key = torch.randn(2, 1, HEAD_SIZE, dtype=torch.float64).expand(2, 40, HEAD_SIZE)
    places = torch.arange(40)
    (rotated, near), (_, far) = op(places, query, key), op(places + 9, query, key)
    scores = (rotated * far).sum(-1)
    torch.testing.assert_close(scores, scores[:1].expand(40))
    torch.testing.assert_close((rotated * near).sum(-1), (query * key).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_table(dtype: torch.dtype) -> None:
    """The table holds cosines, then sines, computed in float32 and rounded to the dtype; it is not saved."""
    op = rope(6, dtype)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 6, 2).float() / 6)
    angles = torch.arange(64).float()[:, None] * frequencies
    assert torch.equal(op.cos_sin_cache, torch.cat([angles.cos(), angles.sin()], -1).to(dtype))
    assert not op.state_dict()
    assert op.half().cos_sin_cache.dtype == torch.float16


def test_a_variant_makes_its_own_table() -> None:
    """A subclass changes the frequencies by one method, and with ``init_cache=False`` the base makes no table."""

    class Slow(RotaryEmbedding):
        def _compute_inv_freq(self, base: float) -> torch.Tensor:
            return super()._compute_inv_freq(base) / 2

    positions, query = torch.arange(10), torch.randn(10, HEAD_SIZE)
    slow = Slow(HEAD_SIZE, HEAD_SIZE, 64, 10000.0, True, torch.float32)
    torch.testing.assert_close(slow(2 * positions, query), rope()(positions, query))
    assert not hasattr(rope(init_cache=False), "cos_sin_cache")


def test_attributes() -> None:
    """Kernels of plugins read the geometry from the op."""
    op = rope(6, torch.float16, is_neox_style=False)
    assert (op.head_size, op.rotary_dim, op.max_position_embeddings) == (HEAD_SIZE, 6, 64)
    assert (op.base, op.is_neox_style, op.dtype) == (10000.0, False, torch.float16)
    assert "rotary_dim=6" in repr(op)


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_given_tables_rotate_alike(is_neox_style: bool) -> None:
    """``ApplyRotaryEmb`` with rows of the table rotates as ``RotaryEmbedding`` does, batched or not."""
    table = rope(is_neox_style=is_neox_style)
    x, positions = torch.randn(2, 9, HEADS, HEAD_SIZE), torch.randint(0, 64, (9,))
    cos, sin = table.cos_sin_cache[positions].chunk(2, -1)
    op = ApplyRotaryEmb(is_neox_style=is_neox_style)
    expected, _ = table(positions.expand(2, 9), x)
    assert torch.equal(op(x, cos, sin), expected)
    assert torch.equal(op(x[1], cos, sin), expected[1])


@pytest.mark.parametrize("enable_fp32_compute", [True, False])
def test_half_types_rotate_in_float32(enable_fp32_compute: bool) -> None:
    """Half types give the float32 result rounded once, with cosines and sines in whichever dtype."""
    op = ApplyRotaryEmb(enable_fp32_compute=enable_fp32_compute)
    x, (cos, sin) = torch.randn(9, HEADS, HEAD_SIZE).bfloat16(), torch.randn(2, 9, HEAD_SIZE // 2)
    assert torch.equal(op(x, cos, sin), op(x.float(), cos, sin).bfloat16())
    assert op.enable_fp32_compute is enable_fp32_compute


def test_helpers_for_kernels() -> None:
    """A kernel gets the table in its query's dtype, which stays so, and cosines and sines of a sequence."""
    op = RotaryEmbedding(16, 8, 32, 1e4, True, torch.float32)
    exact = op.cos_sin_cache
    assert op._match_cos_sin_cache_dtype(torch.ones(1)) is exact
    cast = op._match_cos_sin_cache_dtype(torch.ones(1, dtype=torch.bfloat16))
    assert cast is op.cos_sin_cache
    assert torch.equal(cast, exact.bfloat16())
    assert not op.state_dict()
    cos, sin = op.get_cos_sin(5)
    assert torch.equal(torch.cat((cos, sin), dim=-1), cast[:5])
    positions, query = torch.arange(5), torch.randn(5, 32)
    settings = (op.head_size, op.rotary_dim, exact, op.is_neox_style)
    plain = RotaryEmbedding(16, 8, 32, 1e4, True, torch.float32)
    for key in (None, query):
        expected = plain(positions, query, key)
        for got, wanted in zip(
            RotaryEmbedding.forward_static(positions, query, key, *settings), expected, strict=True
        ):
            assert got is wanted is None or torch.equal(got, wanted)


def test_matching_a_table_while_compiling_keeps_the_table() -> None:
    """Under a compiler the table is converted for the call only, so that no graph writes to the module."""
    op = RotaryEmbedding(16, 8, 32, 1e4, True, torch.float32)
    match = torch.compile(op._match_cos_sin_cache_dtype, fullgraph=True, backend="eager")
    assert match(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert op.cos_sin_cache.dtype == torch.float32
