"""Buckets for sizes, so that a compiler that specialises on shapes compiles once per bucket."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opgraft.errors import InputError, RecompilationError
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Buckets:
    """The possible sizes of one dimension.

    Attributes:
        sizes: the buckets, ascending.
        what: the name of the size in messages, such as "decode batch".
        setting: the setting of the largest bucket, for messages.

    Raises:
        InputError: there is no bucket, a bucket is not positive, or the buckets do not ascend.
    """

    sizes: tuple[int, ...]
    what: str = "size"
    setting: str = "Buckets(sizes=...)"

    def __post_init__(self) -> None:
        sizes = tuple(self.sizes)
        ascends = all(one < following for one, following in itertools.pairwise(sizes))
        if not sizes or sizes[0] < 1 or not ascends:
            raise InputError(
                f"the buckets for {self.what} are {sizes}: give positive sizes in ascending order"
            )
        object.__setattr__(self, "sizes", sizes)

    def lookup(self, size: int) -> int:
        """Return the smallest bucket that holds ``size``.

        Raises:
            InputError: ``size`` is negative, or greater than the largest bucket.
        """
        if not 0 <= size <= self.sizes[-1]:
            raise InputError(
                f"{self.what} {size} does not fit: the largest bucket is {self.sizes[-1]}. Raise "
                f"it with {self.setting}, or split the input."
            )
        return self.sizes[bisect_left(self.sizes, size)]

    def pad(self, tensor: Tensor, dim: int = 0, value: float = 0) -> Tensor:
        """Append ``value`` to ``tensor`` along ``dim`` up to the bucket of the size.

        The tensor itself is returned if it fills a bucket.

        Raises:
            InputError: see ``lookup``.
        """
        missing = self.lookup(tensor.shape[dim]) - tensor.shape[dim]
        if missing == 0:
            return tensor
        # F.pad takes the numbers of entries before and after, for the last dimension first.
        # The remainder turns a negative dimension into the same one counted from the front.
        following = tensor.dim() - 1 - dim % tensor.dim()
        return F.pad(tensor, (*(0, 0) * following, 0, missing), value=value)


def unpad(tensor: Tensor, size: int, dim: int = 0) -> Tensor:
    """Return a view of the first ``size`` entries along ``dim``, as before ``pad``.

    Raises:
        InputError: there are fewer entries.
    """
    if not 0 <= size <= tensor.shape[dim]:
        raise InputError(
            f"unpad: there are {tensor.shape[dim]} entries along dimension {dim}, not {size}"
        )
    return tensor.narrow(dim, 0, size)


def decode_buckets(largest: int = 256, step: int = 8) -> Buckets:
    """Return batch sizes for the decode step: the multiples of ``step`` up to ``largest``.

    In a decode step, each sequence adds one token.

    Raises:
        InputError: ``largest`` is not a positive multiple of ``step``.
    """
    if step < 1 or largest < step or largest % step:
        raise InputError(
            f"decode_buckets: largest={largest} is not a positive multiple of step={step}"
        )
    sizes = tuple(range(step, largest + 1, step))
    return Buckets(sizes, "decode batch", "decode_buckets(largest=...)")


def prefill_buckets(max_length: int, smallest: int = 8) -> Buckets:
    """Return lengths for the prefill step: ``smallest`` times powers of two, and ``max_length``.

    ``prefill_buckets(100, 16)`` has the buckets 16, 32, 64 and 100.

    Raises:
        InputError: an argument is not positive.
    """
    if smallest < 1 or max_length < 1:
        raise InputError(
            f"prefill_buckets: max_length={max_length} and smallest={smallest} must be positive"
        )
    sizes = []
    size = smallest
    while size < max_length:
        sizes.append(size)
        size *= 2
    buckets = (*sizes, max_length)
    return Buckets(buckets, "prefill length", "prefill_buckets(max_length=...)")


@contextmanager
def no_recompilation(compilations: Callable[[], int], allowed: int = 0) -> Iterator[None]:
    """Allow a block to compile at most ``allowed`` programs.

    ``compilations`` returns the number of programs so far. On TPUs, use
    ``current_platform().compilations``. Enter the block after a warm-up with every bucket.

    Raises:
        RecompilationError: the block compiled more programs, and raised nothing itself.
    """
    before = compilations()
    # No "finally": an error of the block must not be hidden behind the error about compilations.
    yield
    compiled = compilations() - before
    if compiled > allowed:
        programs = "program" if compiled == 1 else "programs"
        raise RecompilationError(
            f"{compiled} {programs} compiled where at most {allowed} may be: a shape or a value "
            "that is not padded to a bucket changes from call to call. Warm up every bucket "
            "before, and pad every input to one."
        )
