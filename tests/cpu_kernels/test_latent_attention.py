"""The kernel of attention over latents, on each path."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import opgraft
import pytest
import torch
from opgraft import functional
from opgraft.ops import ColumnParallelLinear, MLAAttention, MLAPagedAttention
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from torch import Tensor

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
SIZES = [(1, 64, 32), (3, 128, 64), (16, 512, 64), (5, 192, 0)]
"""Heads, elements of a latent and of a rotated key."""


def drawn(
    heads: int,
    rank: int,
    rope: int,
    counts: list[int],
    lengths: list[int],
    dtype: torch.dtype,
    block: int = 16,
) -> dict[str, Any]:
    """The last tokens of sequences, over pages of which no row is a number that belongs to nobody."""
    generator = torch.Generator().manual_seed(rank + sum(lengths))
    needed = [-(-length // block) for length in lengths]
    own = torch.randperm(sum(needed) + 3, generator=generator)
    table = torch.full((len(lengths), max(needed, default=0) + 1), -7, dtype=torch.int32)
    cache = torch.full((len(own), block, rank + rope), torch.nan, dtype=dtype)
    for row, (part, length) in enumerate(
        zip(own[: sum(needed)].split(needed), lengths, strict=True)
    ):
        table[row, : len(part)] = part
        rows = torch.randn(length, rank + rope, generator=generator).to(dtype)
        places = torch.arange(length)
        cache[part[places // block], places % block] = rows
    bounds = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    query = torch.randn(sum(counts), heads, rank + rope, generator=generator).to(dtype)
    return {
        "query": query,
        "cache": cache,
        "block_table": table,
        "query_start_loc": bounds,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "kv_lora_rank": rank,
        "scale": 0.5 * (rank + rope) ** -0.5,
    }


def exact(given: dict[str, Any]) -> Tensor:
    """The result in float64, token by token."""
    out, size = [], given["cache"].shape[1]
    for row, (start, end) in enumerate(pairwise(given["query_start_loc"].tolist())):
        length = int(given["seq_lens"][row])
        rows = (
            given["cache"][given["block_table"][row, : -(-length // size)].long()]
            .flatten(0, 1)
            .double()
        )
        for token in range(start, end):
            seen = rows[: length - (end - 1 - token)]
            shares = (given["query"][token].double() @ seen.T * given["scale"]).softmax(-1)
            out.append(shares @ seen[:, : given["kv_lora_rank"]])
    return torch.stack(out)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("sizes", SIZES)
def test_values(sizes: tuple[int, int, int], dtype: torch.dtype, path: str) -> None:
    """Single tokens beside chunks, over one row, some and many chunks of them; what nobody sees is not read."""
    given = drawn(*sizes, counts=[1, 3, 0, 1, 2], lengths=[1, 70, 5, 700, 256], dtype=dtype)
    found = torch.ops.opgraft_cpu_kernels.mla_paged_attention(*given.values())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact(given), **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_token_is_the_same_beside_others_and_among_threads(dtype: torch.dtype, path: str) -> None:
    """Bit for bit: by itself, where threads share its rows, and in a batch."""
    given = drawn(3, 128, 64, counts=[1, 1, 1], lengths=[900, 33, 500], dtype=dtype)
    together = torch.ops.opgraft_cpu_kernels.mla_paged_attention(*given.values())
    threads = torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            for row in range(3):
                one = {
                    **given,
                    "query": given["query"][row : row + 1],
                    "query_start_loc": torch.tensor([0, 1]),
                }
                one |= {name: given[name][row : row + 1] for name in ("block_table", "seq_lens")}
                alone = torch.ops.opgraft_cpu_kernels.mla_paged_attention(*one.values())
                assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kv_lora_rank": 96}, "kv_lora_rank is 96 of 160, expected multiples of 64 and 32"),
        ({"cache": torch.zeros(4, 16, 160).double()}, "cache has dtype"),
        ({"cache": torch.zeros(4, 16, 96)}, "expected .tokens, num_heads, size"),
        ({"block_table": torch.tensor([[0, 99, 1, 1]])}, "block_table has 99, expected 0 to 3"),
        ({"block_table": torch.tensor([[0, -1, 1, 1]])}, "block_table has -1"),
        ({"seq_lens": torch.tensor([65])}, "sequence 0 has 65 tokens, expected 2 to 64"),
        ({"seq_lens": torch.tensor([1])}, "sequence 0 has 1 tokens, expected 2"),
        ({"query_start_loc": torch.tensor([0, 3])}, "query_start_loc is from 0 to 3"),
        (
            {"query_start_loc": torch.tensor([0])},
            "query_start_loc and block_table have 1 and 1 rows",
        ),
    ],
)
def test_refusals(changed: dict[str, Any], words: str, kernels: object) -> None:
    """What does not fit is refused before anything is read."""
    given = {
        "query": torch.zeros(2, 3, 160),
        "cache": torch.zeros(4, 16, 160),
        "block_table": torch.tensor([[0, 2, 1, 3]]),
        "query_start_loc": torch.tensor([0, 2]),
        "seq_lens": torch.tensor([60]),
        "kv_lora_rank": 128,
        "scale": 1.0,
    }
    assert not torch.ops.opgraft_cpu_kernels.mla_paged_attention(*given.values()).any()
    with pytest.raises(ValueError, match=words):
        torch.ops.opgraft_cpu_kernels.mla_paged_attention(*{**given, **changed}.values())


def test_the_form_and_the_op_run_it(plugin: object) -> None:
    """The plugin's kernel is the one that is bound; sizes that it refuses, and gradients, are the definition's."""
    opgraft.load_plugins()
    given = drawn(3, 128, 64, counts=[1, 2], lengths=[40, 50], dtype=torch.float32)
    op = MLAPagedAttention(128, given["scale"])
    assert "cpu" in str(op.decision.chosen)
    expected = torch.ops.opgraft_cpu_kernels.mla_paged_attention(*given.values())
    assert torch.equal(op(*list(given.values())[:5]), expected)
    assert torch.equal(functional.mla_paged_attention(**given), expected)
    spec = SPECS["mla_paged_attention"]
    checks.check_values(spec, "", torch.float32, functional.mla_paged_attention)
    query = given["query"].clone().requires_grad_()
    functional.mla_paged_attention(**{**given, "query": query}).sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("tokens", "heads", "inputs", "outputs"), [(1, 16, 128, 512), (3, 5, 33, 7), (8, 2, 512, 128)]
)
def test_products_by_head(
    tokens: int, heads: int, inputs: int, outputs: int, dtype: torch.dtype, path: str
) -> None:
    """Rows of each head meet its own weight, as a part of wider ones too; with gaps between elements; none at all."""
    wide = torch.randn(tokens, heads, inputs + 9).to(dtype)
    weight = (torch.randn(heads, outputs, inputs) / inputs**0.5).to(dtype)
    spread = torch.full((tokens, heads, 2 * inputs), torch.nan, dtype=dtype)
    spread[..., ::2] = wide[..., :inputs]
    expected = torch.einsum("thi,hoi->tho", wide[..., :inputs].double(), weight.double())
    for x in (wide[..., :inputs], spread[..., ::2]):
        found = torch.ops.opgraft_cpu_kernels.linear_by_heads(x, weight)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, **TOLERANCES[dtype])
    assert torch.ops.opgraft_cpu_kernels.linear_by_heads(wide[:0, :, :inputs], weight).shape == (
        0,
        heads,
        outputs,
    )


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(3, 4, 6),
        torch.zeros(2, 4, 5),
        torch.zeros(3, 4),
        torch.zeros(3, 4, 5).half(),
        torch.zeros(3, 5, 4).mT,
    ],
    ids=["inputs", "heads", "dimensions", "dtype", "rows and columns swapped"],
)
def test_weights_of_heads_that_are_refused(weight: Tensor, kernels: Any) -> None:
    """What does not fit is refused before anything is read."""
    with pytest.raises(ValueError, match=r"linear_by_heads: x has shape .2, 3, 5. and weight"):
        kernels.linear_by_heads(torch.zeros(2, 3, 5), weight)


def test_the_layer_multiplies_by_heads(plugin: object) -> None:
    """Few tokens go by the kernel, more of them and gradients by torch, and the layer's results stay the same."""
    opgraft.load_plugins()
    proj = ColumnParallelLinear(64, 3 * (16 + 24), bias=False, return_bias=False)
    torch.nn.init.normal_(proj.weight)
    layer = MLAAttention(3, 0.2, 16, 8, 24, None, 64, proj)
    assert type(layer).__module__ == "opgraft_cpu_kernels.ops"
    to_key, _ = layer._projections(torch.zeros(1))
    few, many = torch.randn(2, 3, 16), torch.randn(40, 3, 16)
    by_torch = torch.bmm(many.transpose(0, 1), to_key).transpose(0, 1)
    with torch.no_grad():
        assert torch.equal(
            layer.by_heads(few, to_key),
            torch.ops.opgraft_cpu_kernels.linear_by_heads(few, to_key.mT),
        )
        assert torch.equal(layer.by_heads(many, to_key), by_torch)
    layer.by_heads(few.requires_grad_(), to_key).sum().backward()
    torch.testing.assert_close(few.grad, to_key.sum(-1).expand(2, -1, -1))
