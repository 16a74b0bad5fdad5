"""The kernel of attention over pages in a layout of its own, on each path."""

from __future__ import annotations

import dataclasses
import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
from opgraft.ops import Attention, AttentionBatch, attending
from opgraft.ops.attention.codes import quantize_rows, row_size
from opgraft.ops.attention.codes_spec import decoded_rows, encoded
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from torch import Tensor

SPEC = SPECS["paged_attention"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = (torch.int8, torch.uint8)
"""The dtypes of caches of codes: whole numbers, and fp8."""

BLOCK = 32
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 37},
    "all": {"sliding_window": 300, "logits_soft_cap": 3.0, "sinks": torch.linspace(-1, 4, 6)},
}


def unread(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A cache of NaN; of codes, with scales that are."""
    return (
        torch.full(shape, 0xFF, dtype=torch.uint8).view(dtype)
        if dtype in CODES
        else torch.full(shape, torch.nan, dtype=dtype)
    )


def repaged(
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Put keys and values of tokens before a call into pages of the plugin's layout, in ``dtype``, the others aside.

    Returns the cache, the table, the slots of the new tokens, and their keys and values.
    """
    from opgraft_cpu_kernels import attention

    _, _, heads, old, size = cache.shape
    blocks = [-(-n // BLOCK) for n in seq_lens.tolist()]
    dtype = dtype or cache.dtype
    own = unread(attention.cache_shape(sum(blocks) + 3, heads, BLOCK, size, dtype), dtype)
    free = torch.randperm(len(own), generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.full((len(blocks), max(blocks, default=0) + 1), -5, dtype=torch.int32)
    slots, rows = [], []
    for row, ((start, end), length) in enumerate(
        zip(pairwise(query_start_loc.tolist()), seq_lens.tolist(), strict=True)
    ):
        table[row, : blocks[row]] = torch.tensor(
            [free.pop() for _ in range(blocks[row])], dtype=torch.int32
        )
        places = torch.arange(length)
        taken = cache[
            block_table[row, places // old].long(), :, :, places % old
        ]  # [tokens, 2, heads, size]
        where = table[row, places // BLOCK] * BLOCK + places % BLOCK
        before = length - (end - start)
        attention.write(*taken[:before].unbind(1), own, where[:before].long())
        slots.append(where[before:].long())
        rows.append(taken[before:])
    none = torch.zeros(0, dtype=torch.int64), cache.new_zeros(0, 2, heads, size)
    return own, table, torch.cat([none[0], *slots]), *torch.cat([none[1], *rows]).unbind(1)


def kernel(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    dtype: torch.dtype | None = None,
    **others: Any,
) -> Tensor:
    """Call the kernel as the form is called, on a cache of ``dtype``; sizes that it does not take get more zeros."""
    size = query.shape[-1]
    more = -size % 16
    query, cache = (torch.nn.functional.pad(x, (0, more)) for x in (query, cache))
    own, table, slots, key, value = repaged(cache, block_table, query_start_loc, seq_lens, dtype)
    settings = (
        scale,
        others.get("sliding_window"),
        others.get("logits_soft_cap"),
        others.get("sinks"),
    )
    attended = torch.ops.opgraft_cpu_kernels.attend_pages(
        query, key, value, own, slots, table, query_start_loc, seq_lens, *settings
    )
    return attended[..., :size]


@pytest.mark.parametrize(
    "variant", [variant for variant in SPEC.variants if variant not in ("int8", "fp8")]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(variant: str, dtype: torch.dtype, path: str) -> None:
    """Each path computes what the reference computes in float64, amid blocks of NaN."""
    checks.check_values(dataclasses.replace(SPEC, large=()), variant, dtype, kernel)


@functools.cache
def long_contexts(
    settings: str, dtype: torch.dtype, codes: torch.dtype | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Make sequences of several chunks, and what the reference gives of them in float64, which is for all paths."""
    arguments = sequences([600, 5, 1, 1, 0], [600, 530, 1100, 1, 3], dtype)
    exact = {n: x.double() if x.is_floating_point() else x for n, x in arguments.items()}
    if codes:
        exact["cache"] = decoded_rows(encoded(exact["cache"], codes))
    return arguments, SPEC.reference(**exact, scale=0.2, **SETTINGS[settings])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts(settings: str, dtype: torch.dtype, path: str) -> None:
    """Prompts, a part of one and single tokens, over several chunks, are those of the definition in float64."""
    arguments, expected = long_contexts(settings, dtype)
    got = kernel(**arguments, scale=0.2, **SETTINGS[settings])
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        pytest.param(
            name, dtype, marks=[pytest.mark.slow] * (name != "all" and dtype != torch.bfloat16)
        )
        for name in SETTINGS
        for dtype in DTYPES
    ],
)
@pytest.mark.parametrize("codes", CODES)
def test_long_contexts_in_codes(
    settings: str, codes: torch.dtype, dtype: torch.dtype, path: str
) -> None:
    """Over a cache of codes, each path gives what the reference gives in float64 over the numbers that they are."""
    arguments, expected = long_contexts(settings, dtype, codes)
    got = kernel(**arguments, scale=0.2, dtype=codes, **SETTINGS[settings])
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def sequences(counts: list[int], lengths: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    most = -(-max(lengths) // 16)
    return {
        "query": torch.randn(sum(counts), 6, 64, generator=generator).to(dtype),
        "cache": torch.randn(len(counts) * most, 2, 2, 16, 64, generator=generator).to(dtype),
        "block_table": torch.arange(len(counts) * most, dtype=torch.int32).view(len(counts), most),
        "query_start_loc": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
    }


@pytest.mark.parametrize("codes", [None, *CODES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_neighbours(
    dtype: torch.dtype, codes: torch.dtype | None, kernels: Any
) -> None:
    """A token's result has the same bits alone, in a batch, in a prompt and on another number of threads."""
    threads = torch.get_num_threads()
    both = sequences([1, 40], [900, 700], dtype)
    together = kernel(**both, scale=0.2, dtype=codes)
    for row, rows in enumerate((slice(0, 1), slice(40, 41))):
        one = {**both, "query": both["query"][rows], "query_start_loc": torch.tensor([0, 1])}
        one |= {name: both[name][row : row + 1] for name in ("block_table", "seq_lens")}
        for count in (1, 2):
            torch.set_num_threads(count)
            alone = kernel(**one, scale=0.2, dtype=codes)
            torch.set_num_threads(threads)
            assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("codes", [None, *CODES])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("head_size", [64, 24])
def test_layer(dtype: torch.dtype, head_size: int, codes: torch.dtype | None, kernels: Any) -> None:
    """The layer is replaced; over pages it gives what it gives without a batch, in what the kernel lacks too."""
    layer = Attention(6, head_size, 0.2, 2, 20, prefix="attn")
    assert type(layer).__module__ == "opgraft_cpu_kernels.ops"
    given = [
        torch.randn(70, heads * head_size, generator=torch.Generator().manual_seed(heads)).to(dtype)
        for heads in (6, 2, 2)
    ]
    caches = {"attn": unread(layer.kv_cache_shape(4, BLOCK, codes), codes or dtype)}
    assert (caches["attn"].shape[3] == BLOCK) == (head_size == 24)
    attended, done = [], 0
    for count in (33, 1, 36):
        batch = AttentionBatch.of_sequences(
            [count], [done + count], torch.tensor([[2, 0, 3]]), caches, block_size=BLOCK
        )
        with attending(batch), torch.no_grad():
            attended.append(layer(*(x[done : done + count] for x in given)))
        done += count
    tolerance = {None: 2e-2 if dtype.itemsize == 2 else 1e-5, torch.int8: 4e-2, torch.uint8: 0.15}[
        codes
    ]
    torch.testing.assert_close(torch.cat(attended), layer(*given), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("codes", [None, *CODES])
def test_the_fallback_reads_the_same_pages(
    codes: torch.dtype | None, kernels: Any, path: str
) -> None:
    """What the kernel wrote is where the definition finds it, and the other way round."""
    from opgraft_cpu_kernels import attention

    for dtype in DTYPES:
        arguments = sequences([3], [40], dtype)
        query, *rest = (arguments[n] for n in ("query", "query_start_loc", "seq_lens"))
        own, table, slots, key, value = repaged(
            arguments["cache"], arguments["block_table"], *rest, codes
        )
        key, value = (
            key.clone(),
            torch.cat((key, value), 1)[:, 2:],
        )  # rows that adjoin, and that do not
        key[1] = 0
        by_definition = own.clone()
        torch.ops.opgraft_cpu_kernels.attend_pages(query, key, value, own, slots, table, *rest, 0.2)
        attention.write(key, value, by_definition, slots)
        torch.testing.assert_close(own, by_definition, equal_nan=True, rtol=0, atol=0)
        plain = attention.in_opgrafts_layout(own, query)
        assert plain.shape == (len(own), 2, 2, BLOCK, row_size(64, codes))
        block, offset = divmod(int(slots[-1]), BLOCK)
        written = quantize_rows(key[-1], codes) if codes else key[-1]
        torch.testing.assert_close(plain[block, 0, :, offset], written, rtol=0, atol=0)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("nothing", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_lost_in_codes(
    nothing: float, codes: torch.dtype, kernels: Any, path: str
) -> None:
    """A key that is not finite makes its sequence NaN, and no other; one that none sees makes nothing."""
    arguments = sequences([2, 1], [40, 40], torch.float32)
    arguments["cache"][0, 0, 1, 0, 5] = nothing
    attended = kernel(**arguments, scale=0.2, dtype=codes)
    assert attended[:2, 3:].isnan().all()
    assert attended[:2, :3].isfinite().all()
    assert attended[2:].isfinite().all()
    assert kernel(**arguments, scale=0.2, dtype=codes, sliding_window=20).isfinite().all()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"slots": torch.tensor([0, 1, 10**6])}, "slots has 1000000"),
        ({"table": torch.tensor([[0, 99]], dtype=torch.int32)}, "block_table has 99"),
        ({"starts": torch.tensor([0, 2])}, "query_start_loc is from 0 to 2, expected 0 to 3"),
        ({"lengths": torch.tensor([2])}, "has 2 tokens, expected 3"),
        ({"lengths": torch.tensor([65])}, "expected 3 to 64"),
    ],
)
def test_refusals(changed: dict[str, Tensor], words: str, kernels: Any) -> None:
    """Places outside the cache are refused before anything is written."""
    cache = torch.zeros(3, 2, 2, 2, 16 * 64)
    given = {
        "query": torch.ones(3, 6, 64),
        "key": torch.ones(3, 2, 64),
        "value": torch.ones(3, 2, 64),
        "cache": cache,
        "slots": torch.tensor([38, 39, 40]),
        "table": torch.tensor([[0, 1]]),
        "starts": torch.tensor([0, 3]),
        "lengths": torch.tensor([41]),
    }
    with pytest.raises(ValueError, match=words):
        kernels.attend_pages(*{**given, **changed}.values(), 0.2)
    assert not cache.any()


def test_compiled(kernels: Any) -> None:
    """A step compiles without a break, with the kernel as one node, and gives what it gives without compiling."""
    layer = Attention(6, 64, 0.2, 2, prefix="attn")
    caches = {"attn": torch.zeros(layer.kv_cache_shape(2, BLOCK))}
    batch = AttentionBatch.of_sequences(
        [40], [40], torch.tensor([[1, 0]]), caches, block_size=BLOCK
    )
    given = [torch.randn(40, heads, 64) for heads in (6, 2, 2)]
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes.extend(node.name for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(layer.attend_batch, backend=backend, fullgraph=True)
    with torch.no_grad():
        pages = batch.pages["attn"]
        torch.testing.assert_close(
            compiled(batch, pages, *given), layer.attend_batch(batch, pages, *given)
        )
    assert any("attend_pages" in name for name in nodes)
