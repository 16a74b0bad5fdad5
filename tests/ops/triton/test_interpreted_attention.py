"""Attention over pages by the Triton kernels, by Triton's interpreter: batches as an engine has them, and faults.

As ``test_interpreted`` these tests need a process of their own: ``make test-triton``, or
``TRITON_INTERPRET=1 pytest tests/ops/triton/test_interpreted_attention.py``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from opgraft import ops
from opgraft.binding.functional import FUNCTIONALS
from opgraft.engine.core import EngineCore
from opgraft.ops.attention.codes import dequantize_rows
from opgraft.ops.on_triton import on_triton, triton_kernels
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from support.engines import prompts, recorded, serve, settings
from support.random_decoders import DECODERS, written
from torch import Tensor

pytest.importorskip(
    "triton", reason="Triton is not installed here; make test-triton runs these tests"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs a process with TRITON_INTERPRET=1; make test-triton runs these tests",
        allow_module_level=True,
    )

from opgraft.ops.attention import triton as kernels
from opgraft.ops.attention.quantized import triton as quantized_attention
from opgraft.ops.quantization import triton as quantization

pytestmark = pytest.mark.usefixtures("exact_arithmetic")

ATTEND, WRITE = (triton_kernels()[form] for form in ("paged_attention", "write_kv_cache"))
BY_DEFINITION = {form: FUNCTIONALS[form].native for form in ("paged_attention", "write_kv_cache")}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = (torch.int8, torch.uint8)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 11},
    "narrowest window": {"sliding_window": 1},
    "cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 21, "logits_soft_cap": 0.8, "sinks": True},
}
BATCHES: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "one token": ([1], [1]),
    "decodes": ([1, 1, 1, 1, 1], [70, 1, 16, 33, 5]),
    "a prompt": ([67], [67]),
    "prompts, a part of one, decodes and nothing": (
        [9, 0, 1, 20, 1, 0, 3],
        [9, 0, 40, 61, 2, 7, 3],
    ),
    "drafts": ([3, 3, 3], [3, 50, 17]),
    "nothing": ([0, 0], [4, 0]),
}
"""Tokens of each sequence in the query, and in all."""

each_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


def drawn(
    batch: tuple[Sequence[int], Sequence[int]],
    dtype: torch.dtype = torch.float32,
    *,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 20,
    block_size: int = 4,
    nothing: float = torch.nan,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Arguments for a batch, with ``nothing`` in all places without a token, and no such block behind a row's end."""
    generator = torch.Generator().manual_seed(seed)
    counts, lengths = batch
    needed = [-(-length // block_size) for length in lengths]
    own = torch.randperm(sum(needed) + 3, generator=generator).split([*needed, 3])[:-1]
    cache = torch.full((sum(needed) + 3, 2, heads[1], block_size, head_size), nothing, dtype=dtype)
    table = torch.full((len(counts), max(needed) + 2), 10**6, dtype=torch.int32)
    for row, blocks, length in zip(table, own, lengths, strict=True):
        row[: len(blocks)] = blocks
        places = blocks.repeat_interleave(block_size)[:length], torch.arange(length) % block_size
        cache.transpose(2, 3)[places[0], :, places[1]] = torch.randn(
            length, 2, heads[1], head_size, generator=generator
        ).to(dtype)
    sinks = (
        torch.randn(heads[0], generator=generator).to(dtype)
        if settings.pop("sinks", False)
        else None
    )
    return {
        "query": torch.randn(sum(counts), heads[0], head_size, generator=generator).to(dtype),
        "cache": cache,
        "block_table": table,
        "query_start_loc": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "scale": 0.3,
        "sinks": sinks,
        **settings,
    }


def expect_right(arguments: dict[str, Any]) -> None:
    """See that the kernel attends as the spec's reference does in float64."""
    exact = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
    got, expected = ATTEND(**arguments), SPECS["paged_attention"].reference(**exact)
    assert got.dtype == arguments["query"].dtype
    atol, rtol = SPECS["paged_attention"].tolerance(got.dtype)
    torch.testing.assert_close(got.double(), expected, atol=atol, rtol=rtol)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched, in turn; they are launched all the same."""
    names: list[str] = []
    launch = kernels.launch

    def noting(kernel: Any, *arguments: Any, **constants: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(kernels, "launch", noting)
    return names


@each_batch
@each_setting
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches(
    batch: Any, settings: dict[str, Any], dtype: torch.dtype, launched: list[str]
) -> None:
    """Prompts, parts of them and decodes attend as by the reference, and read nothing that no token sees."""
    expect_right(drawn(batch, dtype, **settings))
    assert launched == ["paged_attention_kernel"] * bool(sum(batch[0]))


@pytest.mark.parametrize(
    "batch", [BATCHES["drafts"], BATCHES["prompts, a part of one, decodes and nothing"]]
)
@each_setting
@pytest.mark.parametrize("parts", [2, 8])
def test_keys_in_parts(
    batch: Any,
    settings: dict[str, Any],
    parts: int,
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where programs divide the keys, the sum of their parts is the whole, even of parts without a key."""
    monkeypatch.setattr(kernels, "PART", 1)
    monkeypatch.setattr(kernels, "PROGRAMS", 10**6)
    monkeypatch.setattr(kernels, "tile_of_keys", lambda *arguments: 16)
    arguments = drawn(batch, seed=parts, **settings)
    monkeypatch.setattr(kernels, "MOST_PARTS", parts)
    expect_right(arguments)
    divided = settings.get("sliding_window") != 1
    assert ("added_parts_kernel" in launched) == divided


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lengths", "parted"), [((1500, 3), True), ((200, 90), False)])
def test_a_long_context(
    dtype: torch.dtype, lengths: Any, parted: bool, launched: list[str]
) -> None:
    """Two sequences with long contexts leave a GPU idle, so that their keys are divided; short ones are not."""
    expect_right(drawn(([1, 1], lengths), dtype, head_size=16, block_size=16, sinks=True))
    assert launched == ["paged_attention_kernel", *["added_parts_kernel"] * parted]


@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (6, 2), (7, 1), (71, 1)], ids=str)
@pytest.mark.parametrize(
    ("head_size", "block_size"), [(1, 1), (16, 16), (33, 3), (80, 32), (130, 5)]
)
def test_sizes(
    heads: tuple[int, int], head_size: int, block_size: int, launched: list[str]
) -> None:
    """Any number of heads that share a key head, any size of a head and of a block."""
    batch = [4, 1, 40], [19, 23, 41]
    expect_right(
        drawn(batch, heads=heads, head_size=head_size, block_size=block_size, sliding_window=18)
    )
    assert launched == ["paged_attention_kernel"]


@pytest.mark.parametrize("seed", range(8))
def test_views(seed: int, launched: list[str]) -> None:
    """Views as engines have them are read in place: of one projection, of a wider table, of blocks with a gap."""
    arguments = drawn(BATCHES["drafts"], seed=seed, sliding_window=seed + 5)
    query, cache, table = (arguments[name] for name in ("query", "cache", "block_table"))
    projected = torch.full((len(query), 160), torch.nan)
    arguments["query"] = projected[:, 40:120].view(query.shape).copy_(query)
    gaps = torch.full((2 * len(cache), *cache.shape[1:]), torch.nan)
    arguments["cache"] = gaps[::2].copy_(cache)
    arguments["block_table"] = torch.zeros(3, 40, dtype=torch.int64)[
        :, 1 : table.shape[1] + 1
    ].copy_(table)
    arguments["query_start_loc"] = arguments["query_start_loc"].long().repeat_interleave(2)[::2]
    arguments["seq_lens"] = arguments["seq_lens"].long().repeat_interleave(2)[::2]
    expect_right(arguments)
    assert launched == ["paged_attention_kernel"]


def test_what_is_not_a_number_shows() -> None:
    """A NaN in a query, a key or a value makes NaN of those tokens that see it, and of no others."""
    batch = [30, 1], [30, 40]
    for name, place in (
        ("query", (4, 1)),
        ("cache", (slice(None), 0)),
        ("cache", (slice(None), 1)),
    ):
        clean, dirty = (drawn(batch, heads=(2, 2), nothing=0.0) for _ in range(2))
        before = ATTEND(**clean)
        blocks = dirty["block_table"][0, 5] if name == "cache" else None
        target = dirty[name][blocks, place[1], 1, 3] if name == "cache" else dirty[name][place]
        target.fill_(torch.nan)
        got = ATTEND(**dirty)
        wrong = got.isnan().any(-1)
        first, last = (23, 30) if name == "cache" else (4, 5)
        assert wrong[first:last, 1].all()
        assert torch.equal(got[~wrong], before[~wrong])
        assert not wrong[:, 0].any()
        assert not wrong[30].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [None, *CODES], ids=str)
@pytest.mark.parametrize(("heads", "head_size"), [(1, 64), (2, 9), (11, 20)])
def test_writing(
    dtype: torch.dtype, kind: torch.dtype | None, heads: int, head_size: int, launched: list[str]
) -> None:
    """Keys and values of any magnitude, views of one projection, are written bit for bit as by the definition."""
    blocks = torch.full((18, 2, heads, 4, head_size + (4 if kind else 0)), 77, dtype=kind or dtype)
    ours, theirs = blocks[::2], blocks.clone()[::2]
    magnitudes = 10.0 ** torch.arange(-11, 12).clamp(
        *((-6, 4) if dtype == torch.float16 else (-20, 20))
    )
    projected = (torch.randn(23, 3 * heads * head_size) * magnitudes.view(-1, 1)).to(dtype)
    key, value = (x.view(23, heads, head_size) for x in projected.chunk(3, dim=1)[1:])
    slots = (
        torch.randperm(36).int()[:23]
        if heads == 2
        else torch.randperm(46)[::2].clamp(max=35).unique()
    )
    key, value = key[: len(slots)], value[: len(slots)]
    WRITE(key, value, ours, slots)
    BY_DEFINITION["write_kv_cache"](key, value, theirs, slots)
    assert torch.equal(ours, theirs)
    assert (blocks[1::2] == 77).all()
    assert launched == ["write_kv_cache_kernel"]


@pytest.mark.parametrize("kind", CODES, ids=str)
@pytest.mark.parametrize("nothing", [torch.nan, torch.inf, -torch.inf])
def test_rows_of_codes_that_are_not_finite(kind: torch.dtype, nothing: float) -> None:
    """A row with a number that is not finite is NaN as a whole, as by the definition, and the others are as ever."""
    key = torch.randn(3, 2, 20)
    key[1, 0, 7], key[2] = nothing, 0.0
    ours, theirs = (torch.zeros(1, 2, 2, 4, 24, dtype=kind) for _ in range(2))
    for write, cache in ((WRITE, ours), (BY_DEFINITION["write_kv_cache"], theirs)):
        write(key, key, cache, torch.tensor([2, 0, 1]))
    assert torch.equal(ours, theirs)
    assert dequantize_rows(ours, torch.float32)[0, :, 0, 0].isnan().all()


@pytest.mark.parametrize("settings", [SETTINGS["plain"], SETTINGS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CODES, ids=str)
def test_codes(
    settings: dict[str, Any], dtype: torch.dtype, kind: torch.dtype, launched: list[str]
) -> None:
    """Codes that the kernel has written attend as the numbers that they stand for; places that none sees are NaN."""
    arguments = drawn(([9, 0, 1], [9, 0, 40]), dtype, **settings)
    cache = arguments["cache"]
    codes = torch.full((*cache.shape[:-1], 24), 0xFF, dtype=torch.uint8).view(kind)
    key, value = cache.transpose(2, 3).unbind(1)
    slots = (~key[..., 0, 0].isnan()).flatten().nonzero().flatten()
    WRITE(key.flatten(0, 1)[slots], value.flatten(0, 1)[slots], codes, slots)
    expect_right({**arguments, "cache": codes})
    assert launched == ["write_kv_cache_kernel", "paged_attention_kernel"]


DECLINED: dict[str, Callable[[Tensor], Tensor]] = {
    "a gap behind each element": lambda cache: cache.repeat_interleave(2, -1)[..., ::2],
    "a gap behind each row": lambda cache: torch.cat((cache, cache), -1)[..., : cache.shape[-1]],
    "heads behind tokens": lambda cache: cache.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("case", DECLINED)
def test_caches_that_the_definition_takes(case: str, launched: list[str]) -> None:
    """A cache whose blocks have gaps is read and written by the definition."""
    arguments = drawn(BATCHES["drafts"])
    cache = DECLINED[case](arguments["cache"])
    expect_right({**arguments, "cache": cache})
    ours, theirs = DECLINED[case](arguments["cache"].clone()), arguments["cache"].clone()
    for write, target in ((WRITE, ours), (BY_DEFINITION["write_kv_cache"], theirs)):
        write(torch.ones(2, 2, 20), torch.ones(2, 2, 20), target, torch.tensor([3, 9]))
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert not launched


def test_heads_that_are_too_wide(launched: list[str]) -> None:
    """A head of more than 1 KiB is the definition's, which has no limit."""
    expect_right(drawn(BATCHES["decodes"], head_size=257))
    expect_right(drawn(BATCHES["decodes"], torch.bfloat16, head_size=513))
    assert not launched
    expect_right(drawn(BATCHES["decodes"], torch.bfloat16, head_size=257))
    assert launched


def test_devices_without_fp8(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device has no such conversion, fp8 codes are the definition's, and int8 codes are the kernel's."""
    monkeypatch.setattr(quantization, "_supported", lambda: ("fp8e5",))
    key = torch.randn(3, 2, 20)
    for kind in CODES:
        ours, theirs = (torch.zeros(1, 2, 2, 4, 24, dtype=kind) for _ in range(2))
        for write, cache in ((WRITE, ours), (BY_DEFINITION["write_kv_cache"], theirs)):
            write(key, key, cache, torch.tensor([2, 0, 1]))
        assert torch.equal(ours, theirs)
    assert launched == ["write_kv_cache_kernel"]


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded tensors")
def test_blocks_that_share_memory(launched: list[str]) -> None:
    """Blocks that lie over each other are the definition's, which does as torch does."""
    cache = torch.zeros(1, 2, 2, 4, 20)
    WRITE(
        torch.ones(2, 2, 20),
        torch.ones(2, 2, 20),
        cache.expand(3, -1, -1, -1, -1),
        torch.tensor([1, 5]),
    )
    assert not launched
    assert cache.sum() == cache[:, :, :, 1].sum() == 80


REFUSED = {
    "query": ("paged_attention", {"query": Tensor.int}, "query is torch.int32"),
    "heads": ("paged_attention", {"cache": lambda cache: cache[:, :, :0]}, "cache has 0 heads"),
    "bounds": (
        "paged_attention",
        {"query_start_loc": lambda bounds: bounds + 1},
        "expected it to ascend from 0",
    ),
    "lengths": (
        "paged_attention",
        {"seq_lens": lambda lengths: lengths * 99},
        "seq_lens are .* and at most",
    ),
    "window": ("paged_attention", {"sliding_window": lambda window: 0}, "sliding_window is 0"),
    "cap": ("paged_attention", {"logits_soft_cap": lambda cap: -1.0}, "logits_soft_cap is -1.0"),
    "sinks": ("paged_attention", {"sinks": lambda sinks: torch.zeros(1)}, "sinks has shape"),
    "slots": ("write_kv_cache", {"slots": lambda slots: slots - 99}, "slots reach from"),
    "dtype": ("write_kv_cache", {"value": Tensor.half}, "value is torch.float16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    """What the definition refuses the kernel refuses, in the same words."""
    name, changes, said = REFUSED[case]
    arguments = SPECS[name].arguments("", torch.float32, SPECS[name].leads[1], 9)
    arguments |= {argument: change(arguments.get(argument)) for argument, change in changes.items()}
    messages = []
    for form in (BY_DEFINITION[name], triton_kernels()[name]):
        with pytest.raises(ValueError, match=said) as refused:
            form(**arguments)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_an_engine(family: str, dtype: str, tmp_path: Path, launched: list[str]) -> None:
    """An engine whose attention is the kernels' finds the greedy tokens that it finds by the definitions."""
    written(DECODERS[family][0], tmp_path, **{**DECODERS[family][1], "num_hidden_layers": 2})
    outputs = []
    for kernel in ({}, on_triton("opgraft.ops.attention.triton")):
        for op in (ops.PagedAttention, ops.WriteKVCache):
            op.register_oot(type(f"{op.__name__}Here", (op,), {"functional_oot": kernel}), name=op)
        config = settings(tmp_path, max_num_batched_tokens=9)
        core = EngineCore(
            dataclasses.replace(config, cache=dataclasses.replace(config.cache, dtype=dtype))
        )
        requests = [recorded(str(i), prompt, 3)[0] for i, prompt in enumerate(prompts(1, 14, 5))]
        serve(core, requests)
        outputs.append([request.output for request in requests])
        opgraft.reset()
    assert outputs[0] == outputs[1]
    assert {"write_kv_cache_kernel", "paged_attention_kernel"} <= set(launched)


@pytest.mark.parametrize("variant", ["int8", "fp8"])
def test_codes_beside_queries_of_half_precision(variant: str) -> None:
    """Codes are multiplied as they are and scaled afterwards, so that nothing but weights is rounded."""
    small = dataclasses.replace(SPECS["paged_attention"], large=())
    for dtype in (torch.bfloat16, torch.float16):
        assert checks.check_values(small, variant, dtype, ATTEND) < 0.5


QUANTISED = "scaled_dot_product_attention_quant_fp8_static"


def quantised_by(
    lengths: tuple[int, int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    **settings: Any,
) -> tuple[Tensor, Tensor, list[str]]:
    """Attend with a result in fp8, and return it, that of the reference in float64, and the launched kernels."""
    queries, keys = lengths
    generator = torch.Generator().manual_seed(sum(lengths))
    size = settings.pop("head_size", 20)

    def draw(tokens: int, count: int) -> Tensor:
        rows = torch.randn(2, tokens, count, size, generator=generator).to(dtype)
        # Heads as a layer has them: columns of a projection.
        return rows.transpose(1, 2)

    arguments = {
        "query": draw(queries, heads[0]),
        "key": draw(keys, heads[1]),
        "value": draw(keys, heads[1]),
        "output_scale": torch.tensor([0.05]),
        "enable_gqa": heads[0] != heads[1],
        **settings,
    }
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (quantized_attention, quantization):
            patch.setattr(module, "launch", _noting(module.launch, names))
        got = triton_kernels()[QUANTISED](**arguments)
    exact = {k: v.double() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    return got, SPECS[QUANTISED].reference(**exact), names


def _noting(launch: Any, names: list[str]) -> Callable[..., None]:
    def note(kernel: Any, *arguments: Any, **constants: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    return note


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 70), (70, 33), (33, 70)], ids=str)
def test_a_quantised_result(
    lengths: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype, is_causal: bool
) -> None:
    """One kernel attends and quantises: tokens and keys over several tiles, heads that share keys, causal or not."""
    got, expected, names = quantised_by(lengths, heads, dtype, is_causal=is_causal)
    assert names == ["attention_quant_kernel"]
    assert got.is_contiguous()
    atol, rtol = SPECS[QUANTISED].tolerance(got.dtype)
    torch.testing.assert_close(got.double(), expected.double(), atol=atol, rtol=rtol)


UNTAKEN = {
    "a mask": {"attn_mask": -torch.ones(9, 12).triu(3)},
    "a wide head": {"head_size": 300},
}


@pytest.mark.parametrize("case", UNTAKEN)
def test_a_quantised_result_by_separate_kernels(case: str) -> None:
    """For what the kernel does not take, torch attends, and the kernel of the quantisation follows."""
    got, expected, names = quantised_by((9, 12), (4, 4), torch.float32, **UNTAKEN[case])
    assert names == ["given_scale_kernel"]
    atol, rtol = SPECS[QUANTISED].tolerance(got.dtype)
    torch.testing.assert_close(got.double(), expected.double(), atol=atol, rtol=rtol)


def test_a_quantised_result_refuses_as_the_definition() -> None:
    """Heads that share no keys evenly are refused in the words of the definition."""
    with pytest.raises(ValueError, match="key has 3 heads, expected a divisor of the 4 heads"):
        quantised_by((5, 6), (4, 3), torch.float32)
