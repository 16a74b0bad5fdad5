"""Few static shapes instead of many: sizes are padded up to buckets, so that a compiler which specialises on shapes
compiles once per bucket."""

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
    """The sizes that one dimension may have.

    Attributes:
        sizes: the buckets, ascending.
        what: what is counted, for messages, such as "decode batch".
        setting: what makes the largest bucket larger, for messages.

    Raises:
        InputError: there is no bucket, one is not positive, or they do not ascend.
    """

    sizes: tuple[int, ...]
    what: str = "size"
    setting: str = "Buckets(sizes=...)"

    def __post_init__(self) -> None:
        sizes = tuple(self.sizes)
        if not sizes or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
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
                f"{self.what} {size} does not fit: the largest bucket is {self.sizes[-1]}. Raise it with "
                f"{self.setting}, or split the input."
            )
        return self.sizes[bisect_left(self.sizes, size)]

    def pad(self, tensor: Tensor, dim: int = 0, value: float = 0) -> Tensor:
        """Append ``value`` to ``tensor`` along ``dim`` up to its bucket; return the tensor itself where it fills one.

        Raises:
            InputError: as for ``lookup``.
        """
        missing = self.lookup(tensor.shape[dim]) - tensor.shape[dim]
        if missing == 0:
            return tensor
        following = tensor.dim() - 1 - dim % tensor.dim()  # F.pad counts dimensions from the last
        return F.pad(tensor, (*(0, 0) * following, 0, missing), value=value)


def unpad(tensor: Tensor, size: int, dim: int = 0) -> Tensor:
    """Return the first ``size`` entries along ``dim``, a view: what ``pad`` was given.

    Raises:
        InputError: there are fewer.
    """
    if not 0 <= size <= tensor.shape[dim]:
        raise InputError(
            f"unpad: there are {tensor.shape[dim]} entries along dimension {dim}, not {size}"
        )
    return tensor.narrow(dim, 0, size)


def decode_buckets(largest: int = 256, step: int = 8) -> Buckets:
    """Return batch sizes of the decode step, where each sequence adds a token: multiples of ``step`` to ``largest``.

    Raises:
        InputError: ``largest`` is not a positive multiple of ``step``.
    """
    if step < 1 or largest < step or largest % step:
        raise InputError(
            f"decode_buckets: largest={largest} is not a positive multiple of step={step}"
        )
    return Buckets(
        tuple(range(step, largest + 1, step)), "decode batch", "decode_buckets(largest=...)"
    )


def prefill_buckets(max_length: int, smallest: int = 8) -> Buckets:
    """Return lengths of the prefill step: ``smallest`` and its doubles below ``max_length``, and ``max_length`` itself.

    Raises:
        InputError: one of them is not positive.
    """
    if smallest < 1 or max_length < 1:
        raise InputError(
            f"prefill_buckets: max_length={max_length} and smallest={smallest} must be positive"
        )
    doubles = [smallest]
    while doubles[-1] < max_length:
        doubles.append(doubles[-1] * 2)
    sizes = (*(size for size in doubles if size < max_length), max_length)
    return Buckets(sizes, "prefill length", "prefill_buckets(max_length=...)")


@contextmanager
def no_recompilation(compilations: Callable[[], int], allowed: int = 0) -> Iterator[None]:
    """Allow a block to compile at most ``allowed`` programs, as ``compilations`` counts them.

    On TPUs ``compilations`` is ``current_platform().compilations``. Counting starts when the block
    is entered, after a warm-up that has met every bucket.

    Raises:
        RecompilationError: more were compiled; only raised where the block itself raised nothing.
    """
    before = compilations()
    yield
    compiled = compilations() - before
    if compiled > allowed:
        raise RecompilationError(
            f"{compiled} program{'' if compiled == 1 else 's'} compiled where at most {allowed} may be: a shape or a "
            "value that is not padded to a bucket changes from call to call. Warm up every bucket before, and pad "
            "every input to one."
        )
