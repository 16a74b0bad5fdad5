"""Padding to buckets, and holding a block to the programs that were compiled before it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opgraft.errors import InputError, RecompilationError
from opgraft.models.bucketing import (
    Buckets,
    decode_buckets,
    no_recompilation,
    prefill_buckets,
    unpad,
)


def test_decode_buckets() -> None:
    """Decode batches come in steps of eight up to 256, unless told otherwise."""
    assert decode_buckets().sizes == tuple(range(8, 257, 8))
    assert decode_buckets(largest=12, step=4).sizes == (4, 8, 12)


@pytest.mark.parametrize(
    ("max_length", "smallest", "sizes"),
    [
        (128, 8, (8, 16, 32, 64, 128)),
        (1000, 8, (8, 16, 32, 64, 128, 256, 512, 1000)),
        (64, 16, (16, 32, 64)),
        (5, 8, (5,)),
        (8, 8, (8,)),
        (9, 8, (8, 9)),
        (1, 1, (1,)),
    ],
)
def test_prefill_buckets(max_length: int, smallest: int, sizes: tuple[int, ...]) -> None:
    """Prefill lengths double up to the greatest length, which is a bucket whatever it is."""
    assert prefill_buckets(max_length, smallest).sizes == sizes


@given(st.lists(st.integers(1, 500), min_size=1, unique=True).map(sorted), st.integers(0, 500))
def test_lookup_finds_the_smallest_that_fits(sizes: list[int], size: int) -> None:
    """Lookup agrees with a search from the front, at every boundary."""
    fitting = [bucket for bucket in sizes if bucket >= size]
    if fitting:
        assert Buckets(tuple(sizes)).lookup(size) == fitting[0]
    else:
        with pytest.raises(InputError, match="does not fit"):
            Buckets(tuple(sizes)).lookup(size)


@pytest.mark.parametrize(
    ("buckets", "size", "setting"),
    [
        (decode_buckets(), 257, r"decode batch 257 .* 256.*decode_buckets\(largest"),
        (prefill_buckets(1000), 1001, r"prefill length 1001 .* 1000.*prefill_buckets\(max_length"),
        (
            Buckets((4, 8), "image count", "VisionConfig.images"),
            9,
            r"image count 9 .* 8.*VisionConfig\.images",
        ),
        (decode_buckets(), -1, "decode batch -1"),
    ],
)
def test_a_size_that_does_not_fit(buckets: Buckets, size: int, setting: str) -> None:
    """The error names the size, the largest bucket and the setting."""
    with pytest.raises(InputError, match=setting):
        buckets.lookup(size)


@pytest.mark.parametrize("sizes", [(), (0, 8), (8, 8), (16, 8), (-8, 8)])
def test_buckets_must_ascend(sizes: tuple[int, ...]) -> None:
    """Buckets that are none, not positive or out of order are refused."""
    with pytest.raises(InputError, match="ascending"):
        Buckets(sizes)


@pytest.mark.parametrize(("largest", "step"), [(0, 8), (7, 8), (20, 8), (8, 0), (-8, 8)])
def test_decode_buckets_refuse_what_is_no_multiple(largest: int, step: int) -> None:
    """The largest decode batch is a multiple of the step."""
    with pytest.raises(InputError, match="multiple"):
        decode_buckets(largest, step)


@pytest.mark.parametrize(("max_length", "smallest"), [(0, 8), (8, 0), (-1, 8)])
def test_prefill_buckets_refuse_what_is_not_positive(max_length: int, smallest: int) -> None:
    """Lengths are positive."""
    with pytest.raises(InputError, match="positive"):
        prefill_buckets(max_length, smallest)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(-4, 3),
    st.integers(0, 16),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_padding_can_be_taken_back(
    shape: list[int], dim: int, size: int, dtype: torch.dtype
) -> None:
    """Along any dimension and in any dtype, padding reaches the bucket and unpadding gives the tensor back."""
    buckets = prefill_buckets(16, 4)
    dim = dim % len(shape)
    shape[dim] = size
    tensor = torch.randn(shape).to(dtype)
    padded = buckets.pad(tensor, dim, value=1)
    assert padded.shape[dim] == buckets.lookup(size)
    assert padded.dtype == dtype
    assert torch.equal(unpad(padded, size, dim), tensor)
    assert torch.all(padded.narrow(dim, size, padded.shape[dim] - size) == 1)


def test_a_tensor_that_fills_its_bucket() -> None:
    """Nothing is copied where nothing is missing, and unpadding is a view."""
    tensor = torch.ones(8, 3)
    assert decode_buckets().pad(tensor) is tensor
    padded = decode_buckets().pad(torch.ones(5, 3))
    assert unpad(padded, 5).data_ptr() == padded.data_ptr()


@pytest.mark.parametrize("size", [9, -1])
def test_unpadding_more_than_there_is(size: int) -> None:
    """Asking for more entries than the tensor has is an error, not a shorter tensor."""
    with pytest.raises(InputError, match="8 entries along dimension 0"):
        unpad(torch.ones(8), size)


class Compiler:
    """A compiler that specialises on shapes, with a counter."""

    def __init__(self) -> None:
        self.programs: set[torch.Size] = set()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.programs.add(x.shape)
        return x * 2

    def compilations(self) -> int:
        return len(self.programs)


def test_no_recompilation_after_a_warm_up() -> None:
    """After one call per bucket, padded inputs of every size compile nothing and compute the same."""
    buckets, compiler = decode_buckets(32), Compiler()
    for size in buckets.sizes:
        compiler(torch.zeros(size, 2))
    with no_recompilation(compiler.compilations):
        for size in range(1, 33):
            x = torch.randn(size, 2)
            assert torch.equal(unpad(compiler(buckets.pad(x)), size), x * 2)


def test_recompilations_are_counted() -> None:
    """The error says how many programs were compiled and how many may be."""
    compiler = Compiler()

    @no_recompilation(compiler.compilations, allowed=1)
    def compile_three() -> None:
        for size in (1, 2, 3, 3):
            compiler(torch.zeros(size))

    with pytest.raises(RecompilationError, match="3 programs compiled where at most 1"):
        compile_three()
    with no_recompilation(compiler.compilations, allowed=1):
        compiler(torch.zeros(4))


def test_an_error_of_the_block_comes_first() -> None:
    """What the block raises is not hidden by what it compiled."""
    compiler = Compiler()

    def fail() -> None:
        compiler(torch.zeros(1))
        raise KeyError("the block's own")

    with pytest.raises(KeyError, match="the block's own"), no_recompilation(compiler.compilations):
        fail()
