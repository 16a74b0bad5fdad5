"""Contracts of the parts that a device may bring to the engine; a check raises ``AssertionError`` where one is broken.

A plugin's own tests call them, with the plugin active.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.config import OpgraftConfig
from opgraft.distributed.communicator import Communicator
from opgraft.engine.engine_core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import DistributedError
from opgraft.ops.attention import Attention
from opgraft.ops.attention.batch import AttentionBatch, attending
from torch import Tensor

SHAPES = ((257, 130), (1,), (3, 5), (2, 4, 6), (0, 4))
"""The first is so large that a fault shows on every rank: otherwise some go on, and wait for those that do not."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
BLOCK, SLOTS = 4, 12
"""Tokens of a block, and blocks of the cache, for attention."""


def check_communicator(communicator: Communicator, device: torch.device | str = "cpu") -> None:
    """See that a communicator computes what ``Communicator`` says; to be called on every rank of its group.

    Args:
        communicator: that of a group of at least two ranks.
        device: where its tensors are.
    """
    for dtype in DTYPES:
        for shape in SHAPES:
            for view in (_whole, _strided):
                _check_collectives(
                    communicator, [view(x) for x in _drawn(communicator, shape, dtype, device)]
                )
    _check_numbers(communicator, device)
    _check_passing_on(communicator, device)
    try:
        communicator.reduce_scatter(torch.ones(communicator.world_size + 1, device=device))
    except DistributedError:
        return
    raise AssertionError(
        "reduce_scatter took a dimension that the ranks do not divide: it is to raise DistributedError"
    )


def _drawn(
    communicator: Communicator,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[Tensor]:
    """Return what each rank has, which every rank can draw: numbers whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(len(shape))
    return [
        torch.randint(-9, 9, shape, generator=generator).to(device, dtype)
        for _ in communicator.ranks
    ]


def _whole(x: Tensor) -> Tensor:
    return x


def _strided(x: Tensor) -> Tensor:
    return torch.stack((x, x), dim=-1)[..., 0].movedim(0, -1)


def _check_collectives(communicator: Communicator, given: Sequence[Tensor]) -> None:
    ranks, rank = communicator.world_size, communicator.rank
    own, total, whole = (
        given[rank],
        torch.stack(list(given)).sum(0, dtype=given[0].dtype),
        list(given),
    )
    _called(communicator, "all_reduce", total, own)
    for dim in range(-1, own.dim()):
        _called(communicator, "all_gather", torch.cat(whole, dim), own, dim)
        wide = torch.cat([own * (part + 1) for part in range(ranks)], dim)
        _called(communicator, "reduce_scatter", total * (rank + 1), wide, dim)
    for other in range(ranks):
        _called(communicator, "gather", torch.cat(whole, -1) if rank == other else None, own, other)
        _called(communicator, "broadcast", given[other], own, other)
    # Each rank sends its rows once to the first rank, twice to the second, and so on.
    rows = own.shape[0]
    repeated = torch.cat([own] * (ranks * (ranks + 1) // 2))
    expected = torch.cat([each for each in given for _ in range(rank + 1)])
    sent = [rows * (other + 1) for other in range(ranks)]
    _called(communicator, "all_to_all", expected, repeated, sent, [rows * (rank + 1)] * ranks)


def _called(
    communicator: Communicator, name: str, expected: Tensor | None, x: Tensor, *others: Any
) -> None:
    """Call a collective, and compare what it returns; it is to leave what it is given."""
    before = x.clone()
    found = getattr(communicator, name)(x, *others)
    if not torch.equal(x, before):
        raise AssertionError(f"{name} wrote to the tensor that it was given")
    if (found is None) != (expected is None):
        told = "nothing" if found is None else "a tensor"
        raise AssertionError(
            f"{name} returned {told}: it is to return a tensor on the rank that is asked for, else None"
        )
    if found is not None and expected is not None:
        _expect(name, found, expected)


def _check_numbers(communicator: Communicator, device: torch.device | str) -> None:
    own = torch.tensor(float(communicator.rank), device=device)
    numbers = torch.arange(communicator.world_size, dtype=torch.float32, device=device)
    _expect("all_reduce of a number", communicator.all_reduce(own), numbers.sum())
    _expect("all_gather of numbers", communicator.all_gather(own), numbers)


def _check_passing_on(communicator: Communicator, device: torch.device | str) -> None:
    """The first rank sends a tensor that is handed on from rank to rank."""
    rank, expected = communicator.rank, torch.arange(6.0, device=device).view(2, 3).t()
    handed = expected if rank == 0 else communicator.recv((3, 2), torch.float32, device, rank - 1)
    _expect("recv", handed, expected)
    if rank + 1 < communicator.world_size:
        communicator.send(handed, rank + 1)


def _expect(what: str, found: Tensor, expected: Tensor) -> None:
    if (found.shape, found.dtype, found.device) != (
        expected.shape,
        expected.dtype,
        expected.device,
    ):
        raise AssertionError(
            f"{what} returned {tuple(found.shape)} of {found.dtype} on {found.device}, expected "
            f"{tuple(expected.shape)} of {expected.dtype} on {expected.device}"
        )
    if not torch.equal(found, expected):
        raise AssertionError(
            f"{what} of {tuple(expected.shape)} in {expected.dtype} returned other numbers"
        )


def check_attention_layout(
    make: Callable[..., Attention] = Attention,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    tolerance: float = 1e-4,
) -> None:
    """See that attention over its own cache layout computes what attention over all tokens at once computes.

    Sequences come in chunks of unlike lengths, over blocks that lie scattered and held NaN before; with a window and a
    soft cap, too.

    Args:
        make: constructs the layer, with the arguments of ``Attention``.
        dtype: of queries, keys and values, and of the cache.
        device: where they are.
        tolerance: of the results, absolute and relative.
    """
    cases = ((4, 4, None, None), (4, 2, None, None), (6, 2, 3, None), (4, 2, None, 2.0))
    for heads, kv_heads, window, cap in cases:
        layer = make(heads, 16, 0.3, kv_heads, window, cap, prefix="checked")
        shape = layer.kv_cache_shape(SLOTS, BLOCK)
        if shape[0] != SLOTS:
            raise AssertionError(
                f"the cache of {SLOTS} blocks has the shape {tuple(shape)}: dimension 0 is the block"
            )
        cache = torch.full(shape, torch.nan, dtype=dtype, device=device)
        generator = torch.Generator().manual_seed(heads)
        sizes = (heads * 16, kv_heads * 16, kv_heads * 16)
        long, short = (
            [torch.randn(count, size, generator=generator).to(device, dtype) for size in sizes]
            for count in (17, 11)
        )
        found = _in_chunks(layer, cache, (long, short))
        for result, given in zip(found, (long, short), strict=True):
            expected = _attended(layer, *given)
            torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=tolerance)


def _in_chunks(
    layer: Attention, cache: Tensor, sequences: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    table = torch.tensor([[3, 7, 11, 0, 5], [9, 1, 4, 10, 2]])
    results: list[list[Tensor]] = [[], []]
    done = [0, 0]
    for chunks in ((7, 4), (1, 1), (1, 5), (8, 1)):
        so_far = [before + count for before, count in zip(done, chunks, strict=True)]
        caches = {layer.prefix: cache}
        batch = AttentionBatch.of_sequences(
            chunks, so_far, table, caches, block_size=BLOCK, device=cache.device
        )
        spans = [slice(before, after) for before, after in zip(done, so_far, strict=True)]
        parts = zip(
            *([x[span] for x in each] for each, span in zip(sequences, spans, strict=True)),
            strict=True,
        )
        with torch.inference_mode(), attending(batch):
            attended = layer(*(torch.cat(part) for part in parts))
        for result, part in zip(results, attended.split(chunks), strict=True):
            result.append(part)
        done = so_far
    return [torch.cat(result) for result in results]


def _attended(layer: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend over a whole sequence in float32: softmax of scaled, capped scores; causal, within the window."""
    groups, tokens = layer.num_heads // layer.num_kv_heads, len(query)
    query, key, value = (
        x.float().view(tokens, -1, layer.head_size).transpose(0, 1) for x in (query, key, value)
    )
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = (behind >= 0) & (behind < (layer.sliding_window or tokens))
    scores = query @ key.repeat_interleave(groups, 0).mT * layer.scale
    if layer.logits_soft_cap is not None:
        scores = torch.tanh(scores / layer.logits_soft_cap) * layer.logits_soft_cap
    shares = scores.masked_fill(~seen.to(scores.device), float("-inf")).softmax(-1)
    return (shares @ value.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1)


def check_engine(
    given: OpgraftConfig, expected: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """See that the engine of this process, whatever parts of it are replaced, keeps its promises for a checkpoint.

    Requests come in chunks beside each other, one after an end of the others, one aborted: each has the tokens that it
    has alone, the same again from a reused prefix, seeded ones too; afterwards the cache is empty.

    Args:
        given: names a decoder. Its cache and limits are those of a small engine unless they are set.
        expected: tokens of the requests, such as an engine without the plugin returned; not compared if not given.

    Returns:
        The tokens of each request.
    """
    core = EngineCore(given)
    try:
        together = _answers(core, range(len(PROMPTS)))
        for number, tokens in enumerate(together):
            if _answers(core, [number]) != [tokens]:
                raise AssertionError(
                    f"request {number} has other tokens alone, from its reused prefix, than beside others"
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
"""Token ids of the requests of ``check_engine``."""


def _answers(core: EngineCore, numbers: Sequence[int]) -> list[list[int]]:
    requests = []
    for number in numbers:
        drawn: dict[str, Any] = (
            {"temperature": 0.8, "top_k": 20, "seed": number} if number % 2 else {"temperature": 0}
        )
        params = SamplingParams(max_tokens=8, ignore_eos=True, **drawn)
        requests.append(Request(f"request {number}", PROMPTS[number], params))
    core.add(requests)
    aborted = Request("aborted", PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True))
    core.add([aborted])
    failed = [output.error for output in core.step() if output.error is not None]
    core.abort(aborted.request_id)
    while core.has_work:
        failed += [output.error for output in core.step() if output.error is not None]
    core.step()  # which tells the runner of the last that ended
    if failed:
        raise AssertionError(f"a request failed: {failed[0]}")
    return [request.output for request in requests]
