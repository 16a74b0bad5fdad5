"""Contracts of the parts that a device may bring to the engine.

Tests of a plugin call the checks, with the plugin active. A broken contract is an
``AssertionError``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.config import OpgraftConfig
from opgraft.distributed.communicator import Communicator
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import DistributedError
from opgraft.ops.attention import Attention
from opgraft.ops.attention.batch import AttentionBatch, attending
from torch import Tensor

SHAPES = ((257, 130), (1,), (3, 5), (2, 4, 6), (0, 4))
"""Shapes of tensors. The first one is so large that a fault shows on every rank: otherwise some
ranks would go on, and wait for the others."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
BLOCK, SLOTS = 4, 12
"""Tokens of a block, and blocks of the cache, for attention."""

LENGTHS = (17, 11)
"""Tokens of the sequences for attention."""

CHUNKS = ((7, 4), (1, 1), (1, 5), (8, 1))
"""Tokens of each sequence in each step."""


def check_communicator(communicator: Communicator, device: torch.device | str = "cpu") -> None:
    """Check that a communicator computes everything that ``Communicator`` promises.

    Call this on every rank of the group.

    Args:
        communicator: of a group of at least two ranks.
        device: of the tensors.
    """
    for dtype in DTYPES:
        for shape in SHAPES:
            for view in (_whole, _strided):
                given = [view(x) for x in _drawn(communicator, shape, dtype, device)]
                _check_collectives(communicator, given)
    # A loss is a tensor without dimensions.
    _check_numbers(communicator, device)
    _check_passing_on(communicator, device)
    try:
        communicator.reduce_scatter(torch.ones(communicator.world_size + 1, device=device))
    except DistributedError:
        return
    raise AssertionError(
        "reduce_scatter took a dimension that the ranks do not divide: it is to raise "
        "DistributedError"
    )


def _drawn(
    communicator: Communicator,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[Tensor]:
    """Draw the tensor of each rank, on every rank: numbers with exact sums in every dtype."""
    generator = torch.Generator().manual_seed(len(shape))
    drawn = []
    for _ in communicator.ranks:
        x = torch.randint(-9, 9, shape, generator=generator)
        drawn.append(x.to(device, dtype))
    return drawn


def _whole(x: Tensor) -> Tensor:
    return x


def _strided(x: Tensor) -> Tensor:
    return torch.stack((x, x), dim=-1)[..., 0].movedim(0, -1)


def _check_collectives(communicator: Communicator, given: Sequence[Tensor]) -> None:
    ranks = communicator.world_size
    rank = communicator.rank
    own = given[rank]
    whole = list(given)
    total = torch.stack(whole).sum(0, dtype=own.dtype)
    check = functools.partial(_check_collective, communicator)
    check("all_reduce", total, own)

    # The negative number is the last dimension, too.
    for dim in range(-1, own.dim()):
        check("all_gather", torch.cat(whole, dim), own, dim)
        # The part for each rank is another multiple, so that exchanged parts show.
        multiples = [own * (part + 1) for part in range(ranks)]
        wide = torch.cat(multiples, dim)
        check("reduce_scatter", total * (rank + 1), wide, dim)

    for other in range(ranks):
        gathered = torch.cat(whole, -1) if rank == other else None
        check("gather", gathered, own, other)
        check("broadcast", given[other], own, other)

    _check_all_to_all(communicator, given)


def _check_all_to_all(communicator: Communicator, given: Sequence[Tensor]) -> None:
    """Send the rows of each rank once to the first rank, twice to the second, and so on."""
    ranks = communicator.world_size
    times = communicator.rank + 1
    own = given[communicator.rank]
    rows = own.shape[0]
    copies = ranks * (ranks + 1) // 2
    repeated = torch.cat([own] * copies)
    sent = [rows * (other + 1) for other in range(ranks)]
    received = [rows * times] * ranks
    expected = torch.cat([each for each in given for _ in range(times)])
    _check_collective(communicator, "all_to_all", expected, repeated, sent, received)


def _check_collective(
    communicator: Communicator, name: str, expected: Tensor | None, x: Tensor, *others: Any
) -> None:
    """Call a collective, and compare the result. The argument must stay as it was."""
    before = x.clone()
    found = getattr(communicator, name)(x, *others)
    if not torch.equal(x, before):
        raise AssertionError(f"{name} wrote to the tensor that it was given")
    if (found is None) != (expected is None):
        told = "nothing" if found is None else "a tensor"
        raise AssertionError(
            f"{name} returned {told}: it is to return a tensor on the rank that is asked for, "
            "else None"
        )
    if found is not None and expected is not None:
        _expect(name, found, expected)


def _check_numbers(communicator: Communicator, device: torch.device | str) -> None:
    own = torch.tensor(float(communicator.rank), device=device)
    numbers = torch.arange(communicator.world_size, dtype=torch.float32, device=device)
    _expect("all_reduce of a number", communicator.all_reduce(own), numbers.sum())
    _expect("all_gather of numbers", communicator.all_gather(own), numbers)


def _check_passing_on(communicator: Communicator, device: torch.device | str) -> None:
    """Pass a tensor of the first rank on from rank to rank."""
    rank = communicator.rank
    # A transposed tensor: contiguous memory must not be assumed.
    expected = torch.arange(6.0, device=device).view(2, 3).t()
    handed = expected
    if rank > 0:
        handed = communicator.recv((3, 2), torch.float32, device, rank - 1)
    _expect("recv", handed, expected)
    if rank + 1 < communicator.world_size:
        communicator.send(handed, rank + 1)


def _expect(what: str, found: Tensor, expected: Tensor) -> None:
    ours = found.shape, found.dtype, found.device
    theirs = expected.shape, expected.dtype, expected.device
    if ours != theirs:
        raise AssertionError(
            f"{what} returned {tuple(found.shape)} of {found.dtype} on {found.device}, expected "
            f"{tuple(expected.shape)} of {expected.dtype} on {expected.device}"
        )
    if not torch.equal(found, expected):
        raise AssertionError(
            f"{what} of {tuple(expected.shape)} in {expected.dtype} returned other numbers"
        )


# A view of an ordinary tensor in inference mode is an error of XLA: all tensors are made in it.
@torch.inference_mode()
def check_attention_layout(
    make: Callable[..., Attention] = Attention,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    tolerance: float = 1e-4,
) -> None:
    """Check that attention over the layer's cache layout equals attention over all tokens at once.

    Sequences come in chunks of various lengths. Their blocks are scattered, and hold NaN before.
    Some cases have a window or a soft cap.

    Args:
        make: constructs the layer, with the arguments of ``Attention``.
        dtype: of queries, keys, values and the cache.
        device: of the same.
        tolerance: of the results, absolute and relative.
    """
    cases = ((4, 4, None, None), (4, 2, None, None), (6, 2, 3, None), (4, 2, None, 2.0))
    for heads, kv_heads, window, cap in cases:
        # The scale is unusual, so that a layer with a fixed scale fails.
        with torch.inference_mode(False):  # as an engine makes it
            layer = make(heads, 16, 0.3, kv_heads, window, cap, prefix="checked")
        shape = layer.kv_cache_shape(SLOTS, BLOCK)
        if shape[0] != SLOTS:
            raise AssertionError(
                f"the cache of {SLOTS} blocks has the shape {tuple(shape)}: dimension 0 is the "
                "block"
            )
        # NaN shows any read of a slot that was never written.
        cache = torch.full(shape, torch.nan, dtype=dtype, device=device)
        sequences = _sequences(heads, kv_heads, cache)
        found = _in_chunks(layer, cache, sequences)
        for result, given in zip(found, sequences, strict=True):
            expected = _attended(layer, *given)
            torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=tolerance)


def _sequences(heads: int, kv_heads: int, cache: Tensor) -> list[list[Tensor]]:
    """Draw query, key and value of each sequence, in the dtype of a cache."""
    generator = torch.Generator().manual_seed(heads)
    sequences = []
    for tokens in LENGTHS:
        parts = []
        for size in (heads * 16, kv_heads * 16, kv_heads * 16):
            x = torch.randn(tokens, size, generator=generator)
            parts.append(x.to(cache.device, cache.dtype))
        sequences.append(parts)
    return sequences


def _inputs_between(
    sequences: Sequence[Sequence[Tensor]], starts: Sequence[int], ends: Sequence[int]
) -> list[Tensor]:
    """Return queries, keys and values of some tokens, each for all sequences one after another."""
    # The sequences are at different places of their chunks.
    pieces = []
    for sequence, start, end in zip(sequences, starts, ends, strict=True):
        pieces.append([x[start:end] for x in sequence])
    return [torch.cat(part) for part in zip(*pieces, strict=True)]


def _in_chunks(
    layer: Attention, cache: Tensor, sequences: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the results of a layer for sequences that come in chunks."""
    table = torch.tensor([[3, 7, 11, 0, 5], [9, 1, 4, 10, 2]])
    results: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for chunks in CHUNKS:
        so_far = [before + count for before, count in zip(done, chunks, strict=True)]
        batch = AttentionBatch.of_sequences(
            chunks,
            so_far,
            table,
            {layer.prefix: cache},
            block_size=BLOCK,
            device=cache.device,
        )
        inputs = _inputs_between(sequences, done, so_far)
        with attending(batch):
            attended = layer(*inputs)
        parts = attended.split(chunks)
        for result, part in zip(results, parts, strict=True):
            result.append(part)
        done = so_far
    return list(map(torch.cat, results))


def _attended(layer: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend over a whole sequence in float32: causal softmax of scaled and capped scores."""
    tokens = len(query)

    def by_head(x: Tensor) -> Tensor:
        heads = x.float().view(tokens, -1, layer.head_size)
        return heads.transpose(0, 1)

    # Several heads of the query share a head of key and value.
    groups = layer.num_heads // layer.num_kv_heads
    keys = by_head(key).repeat_interleave(groups, 0)
    values = by_head(value).repeat_interleave(groups, 0)
    # Positions that a query may see: not in the future, and within the window.
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = (behind >= 0) & (behind < (layer.sliding_window or tokens))
    scores = by_head(query) @ keys.mT * layer.scale
    cap = layer.logits_soft_cap
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    masked = scores.masked_fill(~seen.to(scores.device), float("-inf"))
    attended = masked.softmax(-1) @ values
    return attended.transpose(0, 1).flatten(1)


def check_engine(
    given: OpgraftConfig, expected: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """Check that the engine of this process keeps its promises for a checkpoint.

    Any part of the engine may be replaced. Requests come in chunks beside each other, and one is
    aborted. Each request has the same tokens alone, and again from a reused prefix. The cache is
    empty afterwards.

    Args:
        given: names a decoder. Unset limits and the cache are those of a small engine.
        expected: the tokens of the requests from another engine, such as one without the plugin;
            by default not compared.

    Returns:
        The tokens of each request.
    """
    core = EngineCore(given)
    try:
        together = _answers(core, range(len(PROMPTS)))
        for number, tokens in enumerate(together):
            if _answers(core, [number]) != [tokens]:
                raise AssertionError(
                    f"request {number} has other tokens alone, from its reused prefix, than "
                    "beside others"
                )
        if core.cache.pool.num_free != core.cache.pool.num_blocks:
            raise AssertionError("blocks of the cache are held for requests that have ended")
    finally:
        core.shutdown()
    if expected is not None and together != [list(each) for each in expected]:
        raise AssertionError(f"the requests have the tokens {together}, expected {expected}")
    return together


PROMPTS: Sequence[Sequence[int]] = tuple(
    tuple(3 + (7 * place + length) % 60 for place in range(length))
    for length in (5, 17, 1, 9, 23, 12)
)
"""The token ids of each request of ``check_engine``."""


def _answers(core: EngineCore, numbers: Sequence[int]) -> list[list[int]]:
    """Return the tokens of some requests, computed together beside a request that is aborted."""
    requests = [_request(number) for number in numbers]
    core.add(requests)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    aborted = Request("aborted", PROMPTS[0], params)
    # An aborted request must not disturb the others.
    core.add([aborted])
    outputs = list(core.step())
    core.abort(aborted.request_id)
    while core.has_work:
        outputs += core.step()
    # One more step tells the runner of the last request that ended.
    core.step()
    for output in outputs:
        if output.error is not None:
            raise AssertionError(f"a request failed: {output.error}")
    return [request.output for request in requests]


def _request(number: int) -> Request:
    """Return a request with a seed for odd numbers, and a greedy one for even numbers."""
    sampling: dict[str, Any] = {"temperature": 0}
    if number % 2:
        sampling = {"temperature": 0.8, "top_k": 20, "seed": number}
    params = SamplingParams(max_tokens=8, ignore_eos=True, **sampling)
    return Request(f"request {number}", PROMPTS[number], params)
