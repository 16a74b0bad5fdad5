"""Attention over all keys at once: sizes, masks and strides that the spec of the form does not reach."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from opgraft import functional
from torch import Tensor
from torch.nn import functional as F

TOLERANCES = {
    torch.float32: (1e-5, 1.3e-6),
    torch.bfloat16: (1e-2, 1e-2),
    torch.float16: (1e-3, 1e-3),
}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")


def draw(
    batch: int, heads: int, tokens: int, size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Heads of tokens as a projection leaves them: side by side, among others."""
    return torch.randn(batch, tokens, heads + 1, size).to(dtype)[:, :, :heads].transpose(1, 2)


def close(
    got: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    **settings: Any,
) -> None:
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    expected = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), wide, **settings
    )
    atol, rtol = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=atol, rtol=rtol)


@each_dtype
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 1), (1, 300), (2, 7), (3, 17), (4, 16), (5, 31), (7, 257), (17, 48), (200, 33)],
)
def test_any_number_of_tokens(
    path: str, kernels: Any, dtype: torch.dtype, queries: int, keys: int
) -> None:
    """Fewer and more queries than go together, fewer and more keys than a span has, and sizes that fill no vector."""
    for size, value_size in ((1, 1), (9, 40), (64, 64), (80, 17)):
        query = draw(2, 3, queries, size, dtype)
        key, value = draw(2, 3, keys, size, dtype), draw(2, 3, keys, value_size, dtype)
        close(kernels.scaled_dot_product_attention(query, key, value), query, key, value)


@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 9), (2, 600), (40, 40), (300, 300), (300, 20), (20, 300)]
)
def test_causal(path: str, kernels: Any, queries: int, keys: int) -> None:
    """A query sees as many keys as its number and one, however many there are of either."""
    query, key, value = (draw(1, 2, tokens, 24) for tokens in (queries, keys, keys))
    got = kernels.scaled_dot_product_attention(query, key, value, None, 0.0, True)
    close(got, query, key, value, is_causal=True)


@pytest.mark.parametrize(("queries", "keys"), [(1, 20), (19, 300)])
def test_masks(path: str, kernels: Any, queries: int, keys: int) -> None:
    """Masks of both kinds, expanded or not, in any layout; a query that sees no key becomes zero."""
    query, key, value = (draw(2, 3, tokens, 16) for tokens in (queries, keys, keys))
    seen = torch.rand(2, 1, queries, keys) < 0.7
    padding = torch.arange(keys) < torch.tensor([keys // 2, keys]).view(2, 1, 1, 1)
    none = torch.zeros(queries, keys, dtype=torch.bool)
    least = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    masks = (
        seen,
        padding,
        padding.expand(2, 3, queries, keys),
        none,
        seen[0, 0],
        torch.randn(2, 3, queries, keys),
        least,
    )
    for mask in (
        *masks,
        torch.randn(keys, queries).T,
        torch.randn(3, 1, 1),
        torch.randn(2, 1, queries, 2 * keys)[..., ::2],
    ):
        close(
            kernels.scaled_dot_product_attention(query, key, value, mask), query, key, value, mask
        )
    assert not kernels.scaled_dot_product_attention(query, key, value, none).any()


def test_shared_heads_and_dimensions(path: str, kernels: Any) -> None:
    """Heads of keys may serve several of queries; there may be neither batch nor heads."""
    query, key, value = draw(2, 6, 10, 16), draw(2, 2, 12, 16), draw(2, 2, 12, 16)
    run = kernels.scaled_dot_product_attention
    close(
        run(query, key, value, None, 0.0, False, 0.3, True),
        query,
        key,
        value,
        scale=0.3,
        enable_gqa=True,
    )
    close(
        run(query[0], key[0], value[0], enable_gqa=True),
        query[0],
        key[0],
        value[0],
        enable_gqa=True,
    )
    close(run(query[0, 0], key[0, 0], value[0, 0]), query[0, 0], key[0, 0], value[0, 0])
    strided = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (query[:, :2], key, value))
    close(run(*strided), query[:, :2], key, value)


def test_special_values(path: str, kernels: Any) -> None:
    """NaN in a query stays in its row, and infinite scores give what torch gives."""
    query, key, value = (draw(1, 1, 20, 16) for _ in range(3))
    query[0, 0, 3, 5] = torch.nan
    got = kernels.scaled_dot_product_attention(query, key, value)
    assert got[0, 0, 3].isnan().all()
    assert got.isnan().any(-1).sum() == 1
    key[0, 0, 7] = 1e30
    got, expected = (
        kernels.scaled_dot_product_attention(query, key, value),
        F.scaled_dot_product_attention(query, key, value),
    )
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_threads(kernels: Any) -> None:
    """However heads and queries are shared among threads, results are the same."""
    query, key, value = (draw(2, 3, 500, 32) for _ in range(3))
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(kernels.scaled_dot_product_attention(query, key, value))
    finally:
        torch.set_num_threads(threads)
    assert results[0].equal(results[1])
    assert results[0].equal(results[2])


def test_what_the_kernel_does_not_take(kernels: Any) -> None:
    """More dimensions, heads that broadcast, causal beside a mask: computed as torch does, in compiled code too."""
    query, key, value = (draw(2, 4, 10, 16) for _ in range(3))
    mask = torch.ones(10, 10, dtype=torch.bool)
    cases: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((query[None], key[None], value[None]), {}),
        ((query, key[:, :1], value[:, :1]), {}),
        ((query.double(), key.double(), value.double()), {}),
        ((query[:, :, :0], key, value), {}),
        ((query, key, value, mask.double()), {}),
    ]
    compiled = torch.compile(
        functional.scaled_dot_product_attention, backend="aot_eager", fullgraph=True
    )
    with torch.no_grad():
        for arguments, settings in cases:
            try:
                expected = F.scaled_dot_product_attention(*arguments, **settings)
            except RuntimeError:
                with pytest.raises((ValueError, RuntimeError)):
                    functional.scaled_dot_product_attention(*arguments, **settings)
                continue
            torch.testing.assert_close(
                functional.scaled_dot_product_attention(*arguments, **settings), expected
            )
            torch.testing.assert_close(compiled(*arguments, **settings), expected)


def test_gradients(kernels: Any) -> None:
    """Where a gradient is required torch's function runs."""
    query, key, value = (draw(1, 2, 10, 16).detach().requires_grad_() for _ in range(3))
    functional.scaled_dot_product_attention(query, key, value).sum().backward()
    assert query.grad is not None
