"""The random numbers of requests: one for each token, made from its position."""

from __future__ import annotations

from hashlib import blake2b


def stream_of(seed: int | None, arrival: int, engine_seed: int = 0) -> bytes:
    """Name the random numbers of a request: those of its seed, or of its place in the order of arrival at an engine."""
    return b"arrival %d at %d" % (arrival, engine_seed) if seed is None else b"seed %d" % seed


def uniform(stream: bytes, position: int) -> float:
    """Return the number in [0, 1) for a token of a request, equal for equal arguments on every machine.

    It is a hash of both, so no state has to survive a preemption, and nothing that other requests do changes it.

    Args:
        stream: from ``stream_of``.
        position: index of the token in the output.
    """
    digest = blake2b(b"%b %d" % (stream, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
