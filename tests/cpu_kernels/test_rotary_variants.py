"""Rotary embedding by sections of positions and by chunks: tables and settings beyond those of the specs, modules."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from opgraft import functional, ops
from torch import Tensor

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SECTIONS = ([20, 0, 0], [0, 20, 0], [0, 0, 20], [7, 7, 6], [8, 6, 6], [3, 10, 7])
TURNS = ([20, 0, 0], [7, 7, 6], [14, 0, 6], [13, 7, 0], [16, 1, 3])


def table(rows: int, rotary_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    angles = 6 * torch.rand(rows, rotary_dim // 2)
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A query of three heads for each head of the key."""
    return torch.randn(*shape[:-1], 3 * shape[-1]).to(dtype), torch.randn(shape).to(dtype)


def same(form: Any, kernel: Any, *arguments: Any) -> None:
    """The kernel takes the arguments and computes what the definition does."""
    tolerances = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
    tolerance = tolerances[arguments[1].dtype]
    torch.testing.assert_close(
        kernel(*arguments), form.native(*arguments), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_sections(path: str, kernels: Any, dtype: torch.dtype, interleaved: bool) -> None:
    """Pairs are shared out as sections say, those without a pair too, from a table of any dtype."""
    positions = torch.randint(0, 50, (3, 9))
    for sections in TURNS if interleaved else SECTIONS:
        for kind in DTYPES:
            query, key = heads(9, 48, dtype=dtype)
            for neox in (True, False):
                arguments = (
                    positions.int(),
                    query,
                    key,
                    48,
                    table(50, 40, kind),
                    sections,
                    neox,
                    interleaved,
                )
                same(functional.mrope, kernels.mrope, *arguments)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("chunk", [(1, 0), (5, 4), (16, 0), (16, 7)], ids=str)
def test_chunks(path: str, kernels: Any, chunk: tuple[int, int], neox: bool) -> None:
    """The five queries are rotated from their places for any chunk, flat and with their heads apart."""
    positions, cache = torch.randint(0, 1000, (2, 21)), table(32, 40)
    query, key = heads(2, 21, 48)
    for x in (
        query,
        query.view(2, 21, 3, 48),
        query.view(42, 144),
        query[..., :48],
        query.view(2, 21, 3, 1, 48),
    ):
        same(functional.dual_chunk_rotary_embedding, kernels.dual_chunk_rotary_embedding,
             positions.int(), x, key, 48, cache, *chunk, neox)  # fmt: skip


def test_heads_in_two_dimensions(kernels: Any) -> None:
    """Several heads in the last of two dimensions of heads are refused by the op, and the form computes them."""
    positions, cache, (query, key) = torch.arange(5), table(32, 8), heads(5, 16)
    arguments = (positions, query.view(5, 3, 16), key, 8, cache, 16, 7)
    with pytest.raises(ValueError, match="expected heads of 8 in one dimension"):
        kernels.dual_chunk_rotary_embedding(*arguments)
    got = functional.dual_chunk_rotary_embedding(*arguments)
    torch.testing.assert_close(got, functional.dual_chunk_rotary_embedding.native(*arguments))


def test_no_tokens_and_no_heads(kernels: Any) -> None:
    """Nothing to rotate is returned in the shape that it has."""
    query, key = heads(0, 8)
    for positions in (
        torch.empty(3, 0, dtype=torch.int64),
        torch.empty(3, 2, 0, dtype=torch.int64),
    ):
        lead = positions.shape[1:]
        turned = kernels.mrope(
            positions, query.view(*lead, 24), key.view(*lead, 8), 8, table(9, 8), [2, 1, 1]
        )
        assert [x.shape for x in turned] == [(*lead, 24), (*lead, 8)]
        turned = kernels.dual_chunk_rotary_embedding(
            positions[0], query, key.view(*lead, 8), 8, table(9, 8), 4, 1
        )
        assert [x.shape for x in turned] == [(0, 120), (*lead, 8)]
    query = torch.randn(5, 24)
    turned = kernels.dual_chunk_rotary_embedding(
        torch.arange(5), query, query[:, :0], 8, table(9, 8), 4, 1
    )
    assert [x.shape for x in turned] == [(5, 120), (5, 0)]


BAD: dict[str, dict[str, Any]] = {
    "positions has 9, expected 0 to 8": {"positions": torch.tensor([[0, 1], [2, 9], [0, 0]])},
    "positions has -1, expected 0 to 8": {"positions": torch.tensor([[0, 1], [2, 3], [0, -1]])},
    r"positions has shape \[2, 2\]": {"positions": torch.zeros(2, 2, dtype=torch.int64)},
    r"positions has shape \[2\]": {"positions": torch.zeros(2, dtype=torch.int64)},
    r"mrope_section is \[3, 2\]": {"mrope_section": [3, 2]},
    r"mrope_section is \[3, 1, 1\]": {"mrope_section": [3, 1, 1]},
    r"mrope_section is \[5, 0, -1\]": {"mrope_section": [5, 0, -1]},
    r"mrope_section is \[1, 3, 0\]": {"mrope_section": [1, 3, 0], "interleaved": True},
    r"mrope_section is \[2, 0, 2\]": {"mrope_section": [2, 0, 2], "interleaved": True},
    r"expected \[positions, rotary_dim\] with an even rotary_dim up to 6": {"head_size": 6},
    "tensor to rotate has shape": {"key": torch.randn(3, 8)},
    "key has dtype": {"key": torch.randn(2, 8).half()},
}


@pytest.mark.parametrize("message", list(BAD))
def test_what_does_not_fit_sections(kernels: Any, message: str) -> None:
    """What the op would read beyond the end of is refused, by the form too."""
    query, key = heads(2, 8)
    arguments = {
        "positions": torch.zeros(3, 2, dtype=torch.int64),
        "query": query,
        "key": key,
        "head_size": 8,
    }
    arguments |= {"cos_sin_cache": table(9, 8), "mrope_section": [2, 1, 1]} | BAD[message]
    with pytest.raises(ValueError, match=f"mrope: .*{message}"):
        kernels.mrope(**arguments)
    with pytest.raises(ValueError, match="mrope: "):
        functional.mrope(**arguments)


@pytest.mark.parametrize(
    ("positions", "chunk", "message"),
    [
        ([0, -1], (4, 1), "positions has -1"),
        ([0, 1], (4, 4), "local_size is 4"),
        ([0, 1], (4, -1), "local_size is -1"),
        ([0, 1], (6, 2), r"expected at least 6 \+ 4 rows"),
        ([0, 1], (2**63 - 1, 0), "expected at least"),
    ],
)
def test_what_does_not_fit_chunks(
    kernels: Any, positions: list[int], chunk: tuple[int, int], message: str
) -> None:
    """No row beyond the end of the table is read, be it for a query far back only."""
    arguments = (torch.tensor(positions), *heads(2, 8), 8, table(9, 8), *chunk)
    with pytest.raises(ValueError, match=f"dual_chunk_rotary_embedding: .*{message}"):
        kernels.dual_chunk_rotary_embedding(*arguments)
    with pytest.raises(ValueError, match="dual_chunk_rotary_embedding: "):
        functional.dual_chunk_rotary_embedding(*arguments)


@pytest.mark.parametrize("sections", [None, [2, 1, 1]])
def test_a_module_by_sections(plugin: object, sections: list[int] | None) -> None:
    """The module takes positions of text, offsets and no key, as its definition does."""
    op = ops.MRotaryEmbedding(8, 8, 16, 10000.0, True, torch.float32, sections)
    assert op.decision.chosen == "opgraft_cpu_kernels.ops:MRotaryEmbedding.forward_cpu"
    (query, key), text = heads(5, 8), torch.arange(5)
    for positions in (text, *([torch.randint(0, 16, (3, 5))] if sections else [])):
        for others in ((), (key,), (key, torch.tensor(3))):
            torch.testing.assert_close(
                op(positions, query, *others), op.forward_native(positions, query, *others)
            )


def test_a_module_by_chunks(plugin: object) -> None:
    """The module adds offsets and refuses positions beyond its bound, as its definition does."""
    op = ops.DualChunkRotaryEmbedding(8, 8, 100, 10000.0, True, torch.float32, 16, 7)
    assert op.decision.chosen == "opgraft_cpu_kernels.ops:DualChunkRotaryEmbedding.forward_cpu"
    (query, key), positions = heads(5, 8), torch.arange(95, 100)
    for offsets in (None, torch.tensor(-20)):
        got, expected = (call(positions, query, key, offsets) for call in (op, op.forward_native))
        torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="positions reach from 96 to 100, expected 0 to 99"):
        op(positions, query, key, torch.tensor(1))
