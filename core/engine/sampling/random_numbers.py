"""The random numbers of requests: a number per token of the vocabulary, at each output token."""

from __future__ import annotations

from hashlib import blake2b

from torch import Tensor

# The constants of SplitMix64, as signed numbers, because torch multiplies signed numbers.
# Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_BITS = 52


def stream_of(seed: int | None, arrival: int, engine_seed: int = 0) -> bytes:
    """Return a name for the random numbers of a request.

    Requests with equal seeds have equal names. Without a seed, the name depends on the place in the
    order of arrival at an engine.
    """
    if seed is None:
        return b"arrival %d at %d" % (arrival, engine_seed)
    return b"seed %d" % seed


def noise_key(stream: bytes, position: int) -> int:
    """Return the key of the random numbers for one token of a request, signed, of 64 bits.

    The key is a hash of stream and position. So no state has to survive a preemption, and no other
    request has an influence.

    Args:
        stream: from ``stream_of``.
        position: index of the token in the output.
    """
    digest = blake2b(b"%b %d" % (stream, position), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def exponentials(keys: Tensor, counters: Tensor) -> Tensor:
    """Return random numbers above 0, exponentially distributed with the mean 1.

    Equal arguments give equal numbers.

    Args:
        keys: ``[n, 1]`` int64, from ``noise_key``.
        counters: ``[m]`` or ``[n, m]`` int64, a different one for each number of a key.

    Returns:
        ``[n, m]`` float64.
    """
    state = counters * _STEP + keys
    state = state.bitwise_xor_(_shifted(state, 30)).mul_(_FIRST)
    state = state.bitwise_xor_(_shifted(state, 27)).mul_(_SECOND)
    # Half a step is added, so that no number is 0 or 1.
    uniform = _shifted(state, 64 - _BITS).double().add_(0.5).mul_(2.0**-_BITS)
    return uniform.log_().neg_()


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Return the state shifted to the right, with zeros from the left."""
    # torch itself repeats the sign.
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def first_to_arrive(weights: Tensor, keys: Tensor, counters: Tensor) -> Tensor:
    """Draw a position of each row by weights. The sum of a row need not be 1.

    Each position has an exponential random number, divided by its weight. The position with the
    least quotient is drawn. Nearly equal weights nearly always give the same position. A position
    without weight is never drawn.

    Args:
        weights: ``[n, m]`` float64, some of each row above 0.
        keys, counters: as for ``exponentials``.

    Returns:
        ``[n]`` int64.
    """
    return exponentials(keys, counters).reciprocal_().mul_(weights).argmax(-1)
