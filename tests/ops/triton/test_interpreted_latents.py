"""Attention over latents by the Triton kernels, by Triton's interpreter: batches as an engine has them, and faults.

As ``test_interpreted`` these tests need a process of their own: ``make test-triton``, or
``TRITON_INTERPRET=1 pytest tests/ops/triton/test_interpreted_latents.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from opgraft.binding.functional import FUNCTIONALS
from opgraft.ops.on_triton import triton_kernels
from opgraft.testing.catalogue import SPECS
from torch import Tensor

pytest.importorskip(
    "triton", reason="Triton is not installed here; make test-triton runs these tests"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs a process with TRITON_INTERPRET=1; make test-triton runs these tests",
        allow_module_level=True,
    )

from opgraft.ops.attention import triton as pages
from opgraft.ops.attention.latent import triton as kernels

pytestmark = pytest.mark.usefixtures("exact_arithmetic")

FORMS = ("mla_paged_attention", "concat_and_cache_mla")
ATTEND, WRITE = (triton_kernels()[form] for form in FORMS)
BY_DEFINITION = {form: FUNCTIONALS[form].native for form in FORMS}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "one token": ([1], [1]),
    "decodes": ([1, 1, 1, 1, 1], [70, 1, 16, 33, 5]),
    "prompts, a part of one, decodes and nothing": (
        [9, 0, 1, 20, 1, 0, 3],
        [9, 0, 40, 61, 2, 7, 3],
    ),
    "drafts": ([3, 3, 3], [3, 50, 17]),
    "nothing": ([0, 0], [4, 0]),
}
"""Tokens of each sequence in the query, and in all."""

each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


def drawn(
    batch: tuple[Sequence[int], Sequence[int]],
    dtype: torch.dtype = torch.float32,
    *,
    heads: int = 3,
    rank: int = 20,
    rope: int = 6,
    block_size: int = 4,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments for a batch, with NaN in all places without a token, and no such block behind a row's end."""
    generator = torch.Generator().manual_seed(seed)
    counts, lengths = batch
    needed = [-(-length // block_size) for length in lengths]
    own = torch.randperm(sum(needed) + 3, generator=generator).split([*needed, 3])[:-1]
    cache = torch.full((sum(needed) + 3, block_size, rank + rope), torch.nan, dtype=dtype)
    table = torch.full((len(counts), max(needed) + 2), 10**6, dtype=torch.int32)
    for row, blocks, length in zip(table, own, lengths, strict=True):
        row[: len(blocks)] = blocks
        places = blocks.repeat_interleave(block_size)[:length], torch.arange(length) % block_size
        cache[places] = torch.randn(length, rank + rope, generator=generator).to(dtype)
    return {
        "query": torch.randn(sum(counts), heads, rank + rope, generator=generator).to(dtype),
        "cache": cache,
        "block_table": table,
        "query_start_loc": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "kv_lora_rank": rank,
        "scale": 0.3,
    }


def expect_right(arguments: dict[str, Any]) -> None:
    """See that the kernel attends as the spec's reference does in float64."""
    exact = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
    got, expected = ATTEND(**arguments), SPECS["mla_paged_attention"].reference(**exact)
    assert got.dtype == arguments["query"].dtype
    atol, rtol = SPECS["mla_paged_attention"].tolerance(got.dtype)
    torch.testing.assert_close(got.double(), expected, atol=atol, rtol=rtol)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched, in turn; they are launched all the same."""
    names: list[str] = []
    launch = kernels.launch

    def noting(kernel: Any, *arguments: Any, **constants: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    # The kernel that adds up parts is launched by attention over pages.
    for module in (kernels, pages):
        monkeypatch.setattr(module, "launch", noting)
    return names


@each_batch
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches(batch: Any, dtype: torch.dtype, launched: list[str]) -> None:
    """Prompts, parts of them and decodes attend as by the reference, and read nothing that no token sees."""
    expect_right(drawn(batch, dtype))
    assert launched == ["mla_paged_attention_kernel"] * bool(sum(batch[0]))


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("name", ["drafts", "prompts, a part of one, decodes and nothing"])
def test_keys_in_parts(
    name: str, parts: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where programs divide the keys, the sum of their parts is the whole, even of parts without a key."""
    for constant, value in (("PART", 1), ("PROGRAMS", 10**6), ("MOST_PARTS", parts)):
        monkeypatch.setattr(pages, constant, value)
    monkeypatch.setattr(kernels, "KEYS", 16)
    expect_right(drawn(BATCHES[name], seed=parts))
    assert launched == ["mla_paged_attention_kernel", "added_parts_kernel"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_context(dtype: torch.dtype, launched: list[str]) -> None:
    """Two sequences with long contexts leave a GPU idle, so that their keys are divided."""
    expect_right(drawn(([1, 1], (900, 3)), dtype, rank=16, block_size=16))
    assert launched == ["mla_paged_attention_kernel", "added_parts_kernel"]


@pytest.mark.parametrize("heads", [1, 5, 16, 17, 40])
@pytest.mark.parametrize(
    ("rank", "rope", "block_size"), [(1, 1, 1), (16, 16, 16), (33, 0, 3), (70, 40, 5)]
)
def test_sizes(heads: int, rank: int, rope: int, block_size: int, launched: list[str]) -> None:
    """Any number of heads, more than a program has rows among them, any size of a latent, of its key and of a block."""
    expect_right(
        drawn(([4, 1, 11], [19, 23, 12]), heads=heads, rank=rank, rope=rope, block_size=block_size)
    )
    assert launched == ["mla_paged_attention_kernel"]


def test_views(launched: list[str]) -> None:
    """Views as engines have them are read in place: of a wider projection and table, of blocks with a gap."""
    arguments = drawn(BATCHES["drafts"])
    query, cache, table = (arguments[name] for name in ("query", "cache", "block_table"))
    projected = torch.full((len(query), 200), torch.nan)
    arguments["query"] = projected[:, 40:118].view(query.shape).copy_(query)
    gaps = torch.full((2 * len(cache), *cache.shape[1:]), torch.nan)
    arguments["cache"] = gaps[::2].copy_(cache)
    arguments["block_table"] = torch.zeros(3, 40, dtype=torch.int64)[
        :, 1 : table.shape[1] + 1
    ].copy_(table)
    for name in ("query_start_loc", "seq_lens"):
        arguments[name] = arguments[name].long().repeat_interleave(2)[::2]
    expect_right(arguments)
    assert launched == ["mla_paged_attention_kernel"]


DECLINED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a gap behind each element": lambda a: {"cache": a["cache"].repeat_interleave(2, -1)[..., ::2]},
    "a gap behind each row": lambda a: {"cache": torch.cat((a["cache"], a["cache"]), -1)[..., :26]},
    "a wide latent": lambda a: drawn(BATCHES["decodes"], rank=257),
    "a wide latent of a half type": lambda a: drawn(BATCHES["decodes"], torch.bfloat16, rank=513),
}


@pytest.mark.parametrize("case", DECLINED)
def test_what_the_definition_takes(case: str, launched: list[str]) -> None:
    """Caches whose blocks have gaps, and latents of more than 1 KiB, are the definition's."""
    arguments = drawn(BATCHES["decodes"])
    expect_right(arguments | DECLINED[case](arguments))
    assert not launched


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rank", "rope"), [(64, 16), (9, 1), (1100, 64)])
def test_writing(dtype: torch.dtype, rank: int, rope: int, launched: list[str]) -> None:
    """Parts of one projection are written bit for bit, to their places and to no other."""
    blocks = torch.full((18, 4, rank + rope), 77.0, dtype=dtype)
    ours, theirs = blocks[::2], blocks.clone()[::2]
    projected = torch.randn(23, rank + rope + 5).to(dtype)
    projected[3, 2] = torch.nan
    latents, rotated = projected[:, :rank], projected[:, rank + 5 :]
    slots = (
        torch.randperm(36)[:23].int()
        if rank == 9
        else torch.randperm(46)[::2].clamp(max=35).unique()
    )
    latents, rotated = latents[: len(slots)], rotated[: len(slots)]
    WRITE(latents, rotated, ours, slots)
    BY_DEFINITION["concat_and_cache_mla"](latents, rotated, theirs, slots)
    assert torch.equal(ours.nan_to_num(99.0), theirs.nan_to_num(99.0))
    assert (blocks[1::2] == 77).all()
    assert launched == ["concat_and_cache_mla_kernel"]


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded tensors")
def test_caches_that_the_definition_writes(launched: list[str]) -> None:
    """Blocks that lie over each other, rows with a gap and rows without a key are written as torch does."""
    shared, wide, plain = (
        torch.zeros(1, 4, 26).expand(3, -1, -1),
        torch.zeros(2, 4, 40)[..., :26],
        torch.zeros(2, 4, 20),
    )
    for cache, rope in ((shared, 6), (wide, 6), (plain, 0)):
        WRITE(torch.ones(2, 20), torch.ones(2, rope), cache, torch.tensor([1, 5]))
        assert (cache[1, 1] == 1).all()
    assert not launched


REFUSED = {
    "query": ("mla_paged_attention", {"query": Tensor.int}, "query is torch.int32"),
    "rank": ("mla_paged_attention", {"kv_lora_rank": lambda rank: 99}, "kv_lora_rank is 99"),
    "bounds": (
        "mla_paged_attention",
        {"query_start_loc": lambda bounds: bounds + 1},
        "expected it to ascend from 0",
    ),
    "lengths": (
        "mla_paged_attention",
        {"seq_lens": lambda lengths: lengths * 99},
        "seq_lens are .* and at most",
    ),
    "slots": ("concat_and_cache_mla", {"slots": lambda slots: slots - 99}, "slots reach from"),
    "dtype": ("concat_and_cache_mla", {"k_pe": Tensor.half}, "k_pe is torch.float16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    """What the definition refuses the kernel refuses, in the same words."""
    name, changes, said = REFUSED[case]
    arguments = SPECS[name].arguments("", torch.float32, SPECS[name].leads[1], 9)
    arguments |= {argument: change(arguments[argument]) for argument, change in changes.items()}
    messages = []
    for form in (BY_DEFINITION[name], triton_kernels()[name]):
        with pytest.raises(ValueError, match=said) as refused:
            form(**arguments)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
