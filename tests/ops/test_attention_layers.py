"""The attention layer of decoders gives what its definition says, with and without a cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from opgraft.errors import LayerError
from opgraft.ops import Attention
from opgraft.ops.attention import AttentionBatch, attending, current_batch
from opgraft.ops.attention.decoder import attention_layers
from torch import Tensor, nn

TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 3},
    "window of one": {"sliding_window": 1},
    "window longer than the text": {"sliding_window": 50},
    "cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 4, "logits_soft_cap": 0.7, "sinks": True},
}
HEADS = [(1, 1, 5), (3, 3, 7), (6, 2, 5), (5, 1, 16)]
"""Query heads, key heads, head size."""


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    ).to(dtype)


def layer_of(heads: tuple[int, int, int], sinks: bool = False, **settings: Any) -> Attention:
    given = drawn(heads[0], seed=9) if sinks else None
    return Attention(heads[0], heads[2], 0.4, heads[1], sinks=given, prefix="attn", **settings)


def arguments(
    heads: tuple[int, int, int], tokens: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [
        drawn(tokens, count, heads[2], seed=seed, dtype=dtype)
        for seed, count in enumerate((heads[0], heads[1], heads[1]))
    ]


def batch_of(
    lengths: Sequence[int], before: Sequence[int], rows: Sequence[int], cache: Tensor
) -> AttentionBatch:
    """Sequences of a block each, which is a row of the cache of the layer ``attn``."""
    so_far = [old + new for old, new in zip(before, lengths, strict=True)]
    table = torch.tensor(rows, dtype=torch.int32).view(-1, 1)
    return AttentionBatch.of_sequences(
        lengths, so_far, table, {"attn": cache}, block_size=cache.shape[3]
    )


def reference(layer: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend in float64, one query at a time: ``softmax(cap(q · k · scale), sink) · v`` over the keys that it sees."""
    q, k, v = (x.double() for x in (query, key, value))
    out = torch.zeros_like(q)
    for token in range(len(q)):
        window = layer.sliding_window or token + 1
        first = max(0, token + 1 - window)
        for head in range(layer.num_heads):
            served = head * layer.num_kv_heads // layer.num_heads
            scores = k[first : token + 1, served] @ q[token, head] * layer.scale
            if layer.logits_soft_cap is not None:
                scores = layer.logits_soft_cap * (scores / layer.logits_soft_cap).tanh()
            if layer.sinks is not None:
                scores = torch.cat((scores, layer.sinks[head : head + 1].double()))
            shares = scores.exp() / scores.exp().sum()
            out[token, head] = shares[: token + 1 - first] @ v[first : token + 1, served]
    return out


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_one_sequence(settings: str, heads: tuple[int, int, int], tokens: int) -> None:
    """Without a batch all tokens are one sequence, whatever its length, heads and settings."""
    layer = layer_of(heads, **SETTINGS[settings])
    given = arguments(heads, tokens)
    torch.testing.assert_close(
        layer(*given).double(), reference(layer, *given), **TOLERANCES[torch.float32]
    )


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_dtypes(settings: str, dtype: torch.dtype) -> None:
    """The result has the dtype of the query, and its precision: float64 is not computed in less."""
    layer = layer_of((6, 2, 5), **SETTINGS[settings])
    if dtype == torch.float64:
        layer = layer.double()
    given = arguments((6, 2, 5), 13, dtype)
    found = layer(*given)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), reference(layer, *given), **TOLERANCES[dtype])


def test_scores_are_summed_in_float32() -> None:
    """Half types do not overflow or round where a cap or sinks have the layer compute step by step."""
    layer = layer_of((2, 1, 16), logits_soft_cap=2.0)
    query, key, value = (
        x * scale for x, scale in zip(arguments((2, 1, 16), 9), (200.0, 200.0, 1.0), strict=True)
    )
    given = [x.half() for x in (query, key, value)]
    torch.testing.assert_close(
        layer(*given).double(), reference(layer, *given), **TOLERANCES[torch.float16]
    )


@pytest.mark.parametrize("settings", SETTINGS)
def test_views(settings: str) -> None:
    """Arguments may be flat, parts of one tensor, transposed or repeated; none is written to."""
    heads, tokens = (6, 2, 5), 13
    layer = layer_of(heads, **SETTINGS[settings])
    given = arguments(heads, tokens)
    expected = reference(layer, *given).float()
    joint = torch.cat([x.flatten(1) for x in given], dim=1)
    views = {
        "flat": [x.flatten(1) for x in given],
        "parts of one": list(joint.split([30, 10, 10], dim=1)),
        "transposed": [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given],
        "every other": [x.repeat_interleave(2, 0)[::2] for x in given],
    }
    for name, view in views.items():
        before = [x.clone() for x in view]
        found = layer(*view)
        assert found.shape == view[0].shape, name
        torch.testing.assert_close(
            found.reshape(expected.shape), expected, **TOLERANCES[torch.float32]
        )
        assert all(torch.equal(x, old) for x, old in zip(view, before, strict=True)), name
    same = given[1][:1].expand(tokens, -1, -1)
    torch.testing.assert_close(
        layer(given[0], same, same).double(),
        reference(layer, given[0], same, same),
        **TOLERANCES[torch.float32],
    )


@pytest.mark.parametrize("settings", SETTINGS)
def test_nothing_to_do(settings: str) -> None:
    """No tokens give no tokens, without a batch, in an empty one, and for one sequence of several."""
    heads = (6, 2, 5)
    layer = layer_of(heads, **SETTINGS[settings])
    cache = torch.zeros(layer.kv_cache_shape(3, 4))
    assert layer(*arguments(heads, 0)).shape == (0, 6, 5)
    for lengths, rows in (((), ()), ((0,), (0,)), ((0, 0), (1, 0))):
        with attending(batch_of(lengths, (0,) * len(lengths), rows, cache)):
            assert layer(*arguments(heads, 0)).shape == (0, 6, 5)
    given = arguments(heads, 3)
    with attending(batch_of((0, 3, 0), (4, 0, 0), (0, 1, 2), cache)):
        torch.testing.assert_close(
            layer(*given).double(), reference(layer, *given), **TOLERANCES[torch.float32]
        )


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks(settings: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Sequences that come in chunks beside each other give what each gives alone; other rows are not touched."""
    layer = layer_of(heads, **SETTINGS[settings])
    cache = torch.full(layer.kv_cache_shape(4, 14), torch.nan, dtype=dtype)
    texts = {3: arguments(heads, 13, dtype), 0: [x.flip(0) for x in arguments(heads, 11, dtype)]}
    done, found = (
        dict.fromkeys(texts, 0),
        {row: [drawn(0, heads[0], heads[2], dtype=dtype)] for row in texts},
    )
    for chunks in ({3: 6, 0: 1}, {0: 4, 3: 1}, {3: 0, 0: 5}, {0: 1, 3: 5}, {3: 1}):
        parts = [
            [x[done[row] : done[row] + size] for x in texts[row]] for row, size in chunks.items()
        ]
        with attending(
            batch_of(list(chunks.values()), [done[row] for row in chunks], list(chunks), cache)
        ):
            out = layer(*(torch.cat(x) for x in zip(*parts, strict=True)))
        for (row, size), part in zip(chunks.items(), out.split(list(chunks.values())), strict=True):
            found[row].append(part)
            done[row] += size
    for row, text in texts.items():
        torch.testing.assert_close(
            torch.cat(found[row]).double(), reference(layer, *text), **TOLERANCES[dtype]
        )
        assert torch.equal(cache[row, 0, :, : done[row]], text[1].transpose(0, 1))
        assert torch.equal(cache[row, 1, :, : done[row]], text[2].transpose(0, 1))
        assert cache[row, :, :, done[row] :].isnan().all()
    assert cache[1:3].isnan().all()


def test_keys_behind_the_window_are_not_read() -> None:
    """A later engine may drop them."""
    layer = layer_of((2, 1, 4), sliding_window=3)
    given = arguments((2, 1, 4), 8)
    cache = torch.zeros(layer.kv_cache_shape(1, 8))
    with attending(batch_of([6], [0], [0], cache)):
        layer(*(x[:6] for x in given))
    cache[:, :, :, :4] = torch.nan
    with attending(batch_of([2], [6], [0], cache)):
        found = layer(*(x[6:] for x in given))
    torch.testing.assert_close(
        found.double(), reference(layer, *given)[6:], **TOLERANCES[torch.float32]
    )


def test_the_batch_holds_within_its_block() -> None:
    """Batches nest, and an error leaves none behind."""
    outer, inner = AttentionBatch.of_sequences([]), AttentionBatch.of_sequences([1])
    with attending(outer):
        with pytest.raises(LayerError, match="no pages"), attending(inner):
            layer_of((2, 1, 4))(*arguments((2, 1, 4), 1))
        assert current_batch() is outer
    assert current_batch() is None


def test_sinks_go_where_the_layer_goes() -> None:
    """A plain tensor moves with the module and is in no checkpoint; a parameter is shared with whoever gave it."""
    layer = layer_of((2, 1, 4), sinks=True)
    assert not layer.state_dict()
    assert layer.to("meta", torch.float64).sinks.device.type == "meta"
    assert layer.sinks.dtype == torch.float64
    parameter = nn.Parameter(torch.zeros(2))
    assert Attention(2, 4, 0.5, sinks=parameter).sinks is parameter


@pytest.mark.parametrize("settings", ["plain", "all"])
def test_gradients(settings: str) -> None:
    """They reach query, key and value."""
    layer = layer_of((4, 2, 4), **SETTINGS[settings]).double()
    given = [x.requires_grad_() for x in arguments((4, 2, 4), 5, torch.float64)]
    assert torch.autograd.gradcheck(layer, given)


def test_shape_of_a_cache() -> None:
    """Blocks come first."""
    layer = layer_of((6, 2, 5))
    assert layer.kv_cache_shape(7, 32) == (7, 2, 2, 32, 5)
    assert layer.kv_cache_shape(7, 32, torch.int8) == (7, 2, 2, 32, 9)


def test_layers_by_prefix() -> None:
    """Each layer of a model is listed once; two under one prefix, which would share a cache, are refused."""
    first, second = layer_of((2, 1, 4)), Attention(2, 4, 0.5, prefix="other")
    assert attention_layers(nn.ModuleList([first, second, first])) == {
        "attn": first,
        "other": second,
    }
    for clash in (copy.deepcopy(first), layer_of((2, 2, 4))):
        with pytest.raises(LayerError, match="'1' has the prefix 'attn', as another"):
            attention_layers(nn.ModuleList([first, clash]))
    with pytest.raises(LayerError, match="has the prefix ''"):
        attention_layers(nn.ModuleList([Attention(2, 4, 0.5), Attention(2, 4, 0.5)]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": 2.0}, "num_heads is 2.0"),
        ({"num_heads": -2, "num_kv_heads": -1}, "num_heads is -2"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3, expected a divisor of 4"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0, expected a divisor of 4"),
        ({"head_size": 0}, "head_size is 0, expected a positive"),
        ({"head_size": 4.5}, "head_size is 4.5"),
        ({"sliding_window": 0}, "sliding_window is 0, expected a positive"),
        ({"sliding_window": 2.5}, "sliding_window is 2.5"),
        ({"scale": torch.nan}, "scale is nan, expected a finite number"),
        ({"scale": None}, "scale is None, expected a finite number"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0, expected a positive"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0"),
        ({"logits_soft_cap": torch.inf}, "logits_soft_cap is inf, expected a finite number"),
        ({"logits_soft_cap": torch.nan}, "logits_soft_cap is nan"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\), expected one per head, \(4,\)"),
    ],
)
def test_settings_that_no_layer_can_have(settings: dict[str, Any], message: str) -> None:
    """They are refused when the layer is made."""
    with pytest.raises(ValueError, match=f"attention: {message}"):
        Attention(**{"num_heads": 4, "head_size": 8, "scale": 1.0, **settings})


@pytest.mark.parametrize("settings", ["plain", "all"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {0: torch.zeros(())},
            r"query has shape \(\), expected \[tokens, 4 · 3\] or \[tokens, 4, 3\]",
        ),
        ({0: torch.zeros(5, 13)}, r"query has shape \(5, 13\), expected \[5, 4 · 3\]"),
        (
            {1: torch.zeros(4, 2, 3)},
            r"key has shape \(4, 2, 3\), expected \[5, 2 · 3\] or \[5, 2, 3\]",
        ),
        ({1: torch.zeros(5, 4, 3)}, r"key has shape \(5, 4, 3\)"),
        ({2: torch.zeros(1, 5, 2, 3)}, r"value has shape \(1, 5, 2, 3\)"),
        (
            {2: torch.zeros(5, 2, 3).half()},
            "value is torch.float16, expected torch.float32 as query",
        ),
        ({1: torch.zeros(5, 2, 3, device="meta")}, "key is on meta, expected cpu as query"),
        (
            dict(enumerate(torch.zeros(5, n, 3, dtype=torch.long) for n in (4, 2, 2))),
            "query is torch.int64, expected",
        ),
    ],
)
def test_arguments_that_do_not_fit(settings: str, changed: dict[int, Tensor], message: str) -> None:
    """The message names the argument, what it is and what is expected, on both ways to compute."""
    given = {**dict(enumerate(arguments((4, 2, 3), 5))), **changed}
    with pytest.raises(ValueError, match=message):
        layer_of((4, 2, 3), **SETTINGS[settings])(*given.values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (([-1], [0]), "a sequence of 0 tokens has -1 in this call"),
        (([1.0], [1]), "has 1.0 in this call"),
        (([True], [1]), "has True in this call"),
        (([2], [1]), "a sequence of 1 tokens has 2 in this call"),
        (([1, 1], [1]), "2 query_lens, 1 seq_lens and 1 rows"),
        (
            ([1], [9], torch.zeros(1, 2), {"attn": torch.zeros(())}),
            "a sequence has 9 tokens, and its blocks room for 8",
        ),
        (([1], [1], torch.zeros(2, 2)), "1 query_lens, 1 seq_lens and 2 rows"),
    ],
)
def test_batches_that_cannot_be(values: tuple[Any, ...], message: str) -> None:
    """A batch is made of counts, and of blocks for them."""
    with pytest.raises(LayerError, match=message):
        AttentionBatch.of_sequences(*values, block_size=4)


def test_tensors_of_a_batch() -> None:
    """Bounds are one more than lengths, and a tensor is no mapping of pages."""
    two = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(
        LayerError, match=r"query_start_loc of shape \(2,\) and seq_lens of shape \(2,\)"
    ):
        AttentionBatch(two, two, 1, 1, {}, 16)
    with pytest.raises(LayerError, match=r"pages of a batch is tensor.*expected a mapping"):
        AttentionBatch(two, two[1:], 1, 1, torch.zeros(2), 16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "cache", "message"),
    [
        (6, (2, 2, 2, 8, 4), "query has 3 tokens, and the batch 6"),
        (3, (2, 2, 1, 8, 4), r"cache has shape \(2, 2, 1, 8, 4\), expected \(2, 2, 2, 8, 4\)"),
        (3, (2, 2, 2, 9, 4), r"cache has shape \(2, 2, 2, 9, 4\), expected \(2, 2, 2, 8, 4\)"),
        (3, (2, 2, 8, 4), r"cache has shape \(2, 2, 8, 4\), expected"),
        (3, (), r"cache has shape \(\), expected"),
    ],
)
def test_caches_that_do_not_fit(count: int, cache: tuple[int, ...], message: str) -> None:
    """The message names the layer; the cache is not written to."""
    layer, held = layer_of((4, 2, 4)), torch.zeros(cache)
    batch = AttentionBatch.of_sequences(
        [count], None, torch.zeros(1, 1), {"attn": held}, block_size=8
    )
    with attending(batch), pytest.raises(LayerError, match=f"'attn': .*{message}"):
        layer(*arguments((4, 2, 4), 3))
    assert not held.any()


def test_caches_of_another_kind() -> None:
    """A cache that is missing, or has another dtype or device, is told as that."""
    layer, given = layer_of((4, 2, 4)), arguments((4, 2, 4), 3)
    shape, table = layer.kv_cache_shape(1, 4), torch.zeros(1, 1)
    other = AttentionBatch.of_sequences(
        [3], None, table, {"other": torch.zeros(shape)}, block_size=4
    )
    with (
        attending(other),
        pytest.raises(
            LayerError, match="'attn': the batch has no pages for the layer, but for 'ot"
        ),
    ):
        layer(*given)
    for kind, message in (
        ({"dtype": torch.half}, "torch.float16, expected torch.float32"),
        ({"device": "meta"}, "on"),
    ):
        batch = AttentionBatch.of_sequences(
            [3], None, table, {"attn": torch.zeros(shape, **kind)}, block_size=4
        )
        with attending(batch), pytest.raises(ValueError, match=f"cache is {message}.* as key"):
            layer(*given)
