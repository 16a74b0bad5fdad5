"""Attention over padded batches gives each token what it has without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opgraft.engine.runner.input_batch import InputBatch
from opgraft.engine.runner.step_program import StepShape
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.step import NewSequence, ScheduledPart, Step
from opgraft.ops.attention import Attention
from opgraft.ops.attention.batch import AttentionBatch, LayerPages, attending
from opgraft.ops.attention.padded import PaddedAttention
from torch import Tensor

BLOCK, BLOCKS, SCRATCH = 4, 12, 12
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 3},
    "cap and sinks": {"logits_soft_cap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}
DTYPES = {"auto": None, "int8": torch.int8, "fp8": torch.uint8}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def filled(layer: Attention, dtype: torch.dtype | None) -> Tensor:
    """A cache in which everything is NaN, which stands for what nobody may read."""
    shape = layer.kv_cache_shape(BLOCKS + 1, BLOCK, dtype)
    return torch.full(shape, float("nan")) if dtype is None else torch.zeros(shape, dtype=dtype)


def attend(
    layer: Attention, rows: tuple[Tensor, ...], cache: Tensor, batch: dict[str, Any]
) -> Tensor:
    pages = {"": LayerPages(cache, batch["table"], batch["slots"])}
    with attending(AttentionBatch(batch["bounds"], batch["lens"], batch["most"], 16, pages, BLOCK)):
        return layer(*rows)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a prompt": (
        {"bounds": ints(0, 6), "lens": ints(6), "most": 6, "table": ints(7, 2)[None], "tokens": 6},
        {
            "bounds": ints(0, 6),
            "lens": ints(6),
            "most": 8,
            "table": ints(7, 2, SCRATCH, SCRATCH)[None],
            "tokens": 8,
        },
    ),
    "single tokens": (
        {
            "bounds": ints(0, 1, 2),
            "lens": ints(1, 1),
            "most": 1,
            "table": ints(3, 5)[:, None],
            "tokens": 2,
        },
        {
            "bounds": ints(0, 1, 2, 2),
            "lens": ints(1, 1, 0),
            "most": 1,
            "table": ints(3, SCRATCH, 5, SCRATCH, SCRATCH, SCRATCH).view(3, 2),
            "tokens": 3,
        },
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_padding_changes_nothing(case: str, setting: str, dtype: str) -> None:
    """Tokens attend as they do without padding, and nothing is read or written that is not theirs."""
    plain, padded = CASES[case]
    plain["slots"] = torch.tensor([28, 29, 30, 31, 8, 9] if case == "a prompt" else [12, 20])
    missing = padded["tokens"] - plain["tokens"]
    padded["slots"] = torch.cat((plain["slots"], torch.full((missing,), SCRATCH * BLOCK)))
    results, caches = [], []
    for kind, batch in ((Attention, plain), (PaddedAttention, padded)):
        layer = kind(4, 8, 0.3, 2, **SETTINGS[setting])
        caches.append(filled(layer, DTYPES[dtype]))
        rows = [draw(6, heads * 8)[: plain["tokens"]] for heads in (4, 2, 2)]
        rows = [
            torch.cat((each, each.new_ones(batch["tokens"] - len(each), each.shape[1])))
            for each in rows
        ]
        results.append(attend(layer, tuple(rows), caches[-1], batch)[: plain["tokens"]])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(caches[0][:SCRATCH], caches[1][:SCRATCH], equal_nan=True)


def test_other_batches_are_computed_as_ever() -> None:
    """Where sequences have other numbers of rows, the layer does what attention does."""
    batch = {"bounds": ints(0, 3, 4), "lens": ints(3, 1), "most": 3, "table": ints(0, 1)[:, None]}
    batch["slots"] = torch.tensor([0, 1, 2, 4])
    rows = tuple(draw(4, heads * 8) for heads in (4, 2, 2))
    layers = [kind(4, 8, 0.3, 2) for kind in (Attention, PaddedAttention)]
    torch.testing.assert_close(
        *(attend(layer, rows, filled(layer, None), batch) for layer in layers)
    )


def test_a_step_is_padded_to_its_shape() -> None:
    """Padding has the slot of the scratch block, and sequences without tokens; tables are filled up with it."""
    cache = torch.zeros(BLOCKS + 1, 2, 2, BLOCK, 8)
    batch = InputBatch([{"a": cache, "b": cache}], 4, 16, 4, BLOCK, torch.device("cpu"))
    new = NewSequence("x", (5, 6, 7), 3, 3, SamplingParams(), ((9,),), 0)
    scheduled = ScheduledPart("x", 0, 3, ((),), True)
    batch.apply(Step((), (new,), (), (scheduled,)))
    shape = StepShape(1, 8, 4, 1)
    packed = shape.padded(batch.inputs([scheduled]), ["a"], SCRATCH, BLOCK)
    ids, positions, slots, tables, bounds, lengths, sampled = packed.split(shape.sizes)
    assert ids.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert positions.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert slots.tolist() == [36, 37, 38, 48, 48, 48, 48, 48]
    assert tables.tolist() == [9, SCRATCH, SCRATCH, SCRATCH]
    assert (bounds.tolist(), lengths.tolist(), sampled.tolist()) == ([0, 3], [3], [2])
    assert [len(part) for part in shape.empty(SCRATCH, BLOCK).split(shape.sizes)] == shape.sizes
