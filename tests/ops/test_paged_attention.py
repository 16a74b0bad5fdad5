"""Attention over pages: what it must not read, what it refuses, and the layer that writes and reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opgraft import functional
from opgraft.ops import Attention, AttentionBatch, attending
from opgraft.ops.attention.codes import dequantize_rows, quantize_rows
from torch import Tensor

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 8, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS)},
    "all": {"sliding_window": 3, "logits_soft_cap": 1.5, "sinks": torch.linspace(-1, 1, HEADS)},
}


def tokens(count: int, heads: int = KV_HEADS, seed: int = 0) -> Tensor:
    return torch.randn(count, heads, SIZE, generator=torch.Generator().manual_seed(seed))


def pages(count: int, cache: Tensor, blocks: list[int], slots: range) -> dict[str, Any]:
    """The arguments for one sequence, of which the last ``count`` tokens are queries; its keys are written."""
    places = torch.tensor([blocks[slot // BLOCK] * BLOCK + slot % BLOCK for slot in slots])
    functional.write_kv_cache(tokens(len(slots), seed=1), tokens(len(slots), seed=2), cache, places)
    return {
        "query": tokens(count, HEADS),
        "cache": cache,
        "block_table": torch.tensor([blocks], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, count], dtype=torch.int32),
        "seq_lens": torch.tensor([len(slots)], dtype=torch.int32),
        "scale": 0.4,
    }


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize("nothing", [torch.nan, torch.inf])
def test_nothing_unseen_is_read(settings: dict[str, Any], count: int, nothing: float) -> None:
    """Rows that are not a token's of this sequence, or behind its window, may hold anything, as may unused entries."""
    clean = pages(count, torch.zeros(7, 2, KV_HEADS, BLOCK, SIZE), [5, 1, 3], range(10))
    dirty = pages(count, torch.full((7, 2, KV_HEADS, BLOCK, SIZE), nothing), [5, 1, 3], range(10))
    dirty["block_table"] = torch.tensor([[5, 1, 3, -7, 10**6]], dtype=torch.int32)
    if "sliding_window" in settings and count == 1:
        dirty["block_table"][0, 0] = 10**6
    expected = functional.paged_attention(**clean, **settings)
    assert expected.isfinite().all()
    torch.testing.assert_close(functional.paged_attention(**dirty, **settings), expected)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_layer_over_pages(settings: dict[str, Any]) -> None:
    """Two sequences in chunks beside each other, a prompt beside a token, attend as each does alone without a batch."""
    layer = Attention(HEADS, SIZE, 0.4, KV_HEADS, prefix="attn", **settings)
    lengths = {0: 11, 1: 7}
    given = {
        row: [tokens(n, h, 10 * row + i) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS))]
        for row, n in lengths.items()
    }
    alone = {row: layer(*parts) for row, parts in given.items()}
    caches = {"attn": torch.full(layer.kv_cache_shape(8, BLOCK), torch.nan)}
    table = torch.tensor([[6, 0, 3], [2, 5, 1]])
    attended: dict[int, list[Tensor]] = {0: [], 1: []}
    done = [0, 0]
    for counts in ((4, 3), (1, 2), (0, 1), (6, 1)):
        so_far = [before + count for before, count in zip(done, counts, strict=True)]
        batch = AttentionBatch.of_sequences(counts, so_far, table, caches, block_size=BLOCK)
        parts = [
            torch.cat([given[row][i][done[row] : so_far[row]] for row in (0, 1)]).flatten(1)
            for i in range(3)
        ]
        with attending(batch):
            result = layer(*parts)
        for row, part in enumerate(result.unflatten(1, (HEADS, SIZE)).split(counts)):
            attended[row].append(part)
        done = so_far
    for row, parts in attended.items():
        torch.testing.assert_close(torch.cat(parts), alone[row])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"query": torch.zeros(3, HEADS, 7)}, "query has shape"),
        (
            {"query": torch.zeros(3, 5, SIZE)},
            "cache has 2 heads, expected a divisor of the 5 of query",
        ),
        (
            {"query": torch.zeros(3, HEADS, SIZE).double()},
            "cache is torch.float32, expected torch.float64",
        ),
        ({"cache": torch.zeros(3, KV_HEADS, BLOCK, SIZE)}, "cache has shape"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, "block_table has shape"),
        ({"block_table": torch.zeros(1, 3)}, "block_table are torch.float32"),
        ({"query_start_loc": torch.tensor([0, 2])}, "query_start_loc is .*ascend from 0 to 3"),
        ({"query_start_loc": torch.tensor([0, 1, 3])}, r"query_start_loc has shape \(3,\)"),
        ({"seq_lens": torch.tensor([2])}, r"seq_lens are \[2\], expected at least \[3\]"),
        ({"seq_lens": torch.tensor([13])}, "at most 12 as in 3 blocks of 4"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0"),
        ({"sinks": torch.zeros(2)}, "sinks has shape"),
        (
            {"cache": torch.zeros(7, 2, KV_HEADS, BLOCK, SIZE, dtype=torch.int8)},
            r"query has shape .*, heads, 4\]",
        ),
        (
            {"cache": torch.zeros(7, 2, KV_HEADS, BLOCK, SIZE + 4, dtype=torch.int16)},
            "cache is torch.int16",
        ),
    ],
)
def test_attention_refuses(changed: dict[str, Any], words: str) -> None:
    """What does not fit is named."""
    given = pages(3, torch.zeros(7, 2, KV_HEADS, BLOCK, SIZE), [5, 1, 3], range(10))
    with pytest.raises(ValueError, match=words):
        functional.paged_attention(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"key": torch.zeros(2, 3, SIZE), "value": torch.zeros(2, 3, SIZE)}, "key has shape"),
        ({"value": torch.zeros(2, KV_HEADS, 7)}, "value has shape"),
        ({"value": torch.zeros(2, KV_HEADS, SIZE).half()}, "value is torch.float16"),
        ({"cache": torch.zeros(3, 2, KV_HEADS, BLOCK, SIZE).half()}, "cache is torch.float16"),
        ({"slots": torch.tensor([0, 12])}, "slots reach from 0 to 12, expected 0 to 11"),
        ({"slots": torch.tensor([-1, 1])}, "slots reach from -1 to 1"),
        ({"slots": torch.tensor([0.0, 1.0])}, "slots are torch.float32"),
        ({"slots": torch.tensor([0])}, r"slots \(1,\)"),
        (
            {"cache": torch.zeros(3, 2, KV_HEADS, BLOCK, SIZE, dtype=torch.uint8)},
            r"key has shape .*, heads, 4\]",
        ),
    ],
)
def test_writing_refuses(changed: dict[str, Any], words: str) -> None:
    """What does not fit is named, and nothing is written."""
    cache = torch.zeros(3, 2, KV_HEADS, BLOCK, SIZE)
    given = {"key": tokens(2), "value": tokens(2), "cache": cache, "slots": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=words):
        functional.write_kv_cache(**{**given, **changed})
    assert not cache.any()


@pytest.mark.parametrize(("codes", "error"), [(torch.int8, 1 / 254), (torch.uint8, 1 / 16)])
def test_rows_of_codes(codes: torch.dtype, error: float) -> None:
    """Numbers come back to half a step, of the largest in int8, of their own in fp8, whatever their magnitude is."""
    x = tokens(50) * 10.0 ** torch.arange(-25, 25).view(-1, 1, 1)
    again = dequantize_rows(quantize_rows(x, codes), torch.float32)
    largest = x.abs().amax(-1, keepdim=True)
    bound = largest if codes == torch.int8 else x.abs().maximum(largest * 2**-14)
    assert ((again - x).abs() <= bound * (error + 1e-6)).all()
    zeros = torch.zeros(2, 5)
    for rows in (zeros, zeros[:1], zeros[:0]):
        assert torch.equal(
            dequantize_rows(quantize_rows(rows, codes), torch.bfloat16), rows.bfloat16()
        )


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8])
@pytest.mark.parametrize("nothing", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite(codes: torch.dtype, nothing: float) -> None:
    """Such a row is NaN as a whole, so that a fault is not hidden by codes, and the others are as they were."""
    x = tokens(2)
    x[0, 1, 3] = nothing
    again = dequantize_rows(quantize_rows(x, codes), torch.float32)
    assert again[0, 1].isnan().all()
    assert again[0, 0].isfinite().all()
    assert again[1].isfinite().all()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8])
def test_unseen_codes_are_not_read(settings: dict[str, Any], codes: torch.dtype) -> None:
    """Places without a token of the sequence may hold any bytes, scales that are NaN among them."""
    shape = (7, 2, KV_HEADS, BLOCK, SIZE + 4)
    clean = pages(3, torch.zeros(shape, dtype=codes), [5, 1, 3], range(10))
    dirty = pages(3, torch.full(shape, 0xFF, dtype=torch.uint8).view(codes), [5, 1, 3], range(10))
    expected = functional.paged_attention(**clean, **settings)
    assert expected.isfinite().all()
    torch.testing.assert_close(functional.paged_attention(**dirty, **settings), expected)
