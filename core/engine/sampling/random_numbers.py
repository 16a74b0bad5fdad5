"""The random numbers of requests: for each token of an output, one for each token of the vocabulary."""

from __future__ import annotations

from hashlib import blake2b

from torch import Tensor

# The constants of SplitMix64, as the signed numbers that torch multiplies by: Steele, Lea and Flood, "Fast splittable
# pseudorandom number generators", OOPSLA 2014.
_STEP, _FIRST, _SECOND = (
    0x9E3779B97F4A7C15 - 2**64,
    0xBF58476D1CE4E5B9 - 2**64,
    0x94D049BB133111EB - 2**64,
)
_BITS = 52


def stream_of(seed: int | None, arrival: int, engine_seed: int = 0) -> bytes:
    """Name the random numbers of a request: those of its seed, or of its place in the order of arrival at an engine."""
    return b"arrival %d at %d" % (arrival, engine_seed) if seed is None else b"seed %d" % seed


def noise_key(stream: bytes, position: int) -> int:
    """Return the key of the random numbers of a token of a request, a signed number of 64 bits.

    It is a hash of both, so no state has to survive a preemption, and nothing that other requests do changes it.

    Args:
        stream: from ``stream_of``.
        position: index of the token in the output.
    """
    digest = blake2b(b"%b %d" % (stream, position), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def exponentials(keys: Tensor, counters: Tensor) -> Tensor:
    """Return random numbers above 0, distributed exponentially with the mean 1, the same for equal arguments.

    Args:
        keys: ``[n, 1]`` int64, from ``noise_key``.
        counters: ``[m]`` or ``[n, m]`` int64, which tell the numbers of a key apart.

    Returns:
        ``[n, m]`` float64.
    """
    state = counters * _STEP + keys
    state = state.bitwise_xor_(_shifted(state, 30)).mul_(_FIRST)
    state = state.bitwise_xor_(_shifted(state, 27)).mul_(_SECOND)
    uniform = _shifted(state, 64 - _BITS).double().add_(0.5).mul_(2.0**-_BITS)  # neither 0 nor 1
    return uniform.log_().neg_()


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shift to the right with zeros, where torch repeats the sign."""
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def first_to_arrive(weights: Tensor, keys: Tensor, counters: Tensor) -> Tensor:
    """Draw a position of each row by weights that need not add up to 1: the least of exponential times over weights.

    Nearly equal weights nearly always give the same position, wherever in the row they differ. One without weight never
    comes first.

    Args:
        weights: ``[n, m]`` float64, some of each row above 0.
        keys, counters: as for ``exponentials``.

    Returns:
        ``[n]`` int64.
    """
    return exponentials(keys, counters).reciprocal_().mul_(weights).argmax(-1)
