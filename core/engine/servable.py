"""The refusal of requests that could never be served."""

from __future__ import annotations

from collections.abc import Mapping

from opgraft.config import SchedulerConfig
from opgraft.engine.request import Request
from opgraft.engine.schedule.kv_cache import KVCacheManager
from opgraft.errors import RequestError


def expect_servable(
    request: Request,
    known: Mapping[str, Request],
    config: SchedulerConfig,
    cache: KVCacheManager,
    max_model_len: int,
) -> None:
    """Check a new request. An accepted request fits when it runs alone, with any output.

    Args:
        request: the new one.
        known: running and waiting requests, by id.
        config: limits of a step.
        cache: keys and values.
        max_model_len: tokens of prompt and output together, at most.

    Raises:
        RequestError: the id is in use, or prompt, cache and limits do not fit.
    """
    name = f"request {request.request_id!r}"
    prompt = len(request.prompt)
    limit = config.max_num_batched_tokens
    if request.request_id in known:
        raise RequestError(
            f"{name} is added, and one of that id runs or waits: give each an id of its own"
        )
    if prompt >= max_model_len:
        raise RequestError(
            f"{name} has a prompt of {prompt} tokens, and the context holds {max_model_len}, "
            "prompt and output together: shorten the prompt, or raise model.max_model_len"
        )
    if prompt > limit and not config.chunked_prefill:
        raise RequestError(
            f"{name} has a prompt of {prompt} tokens, and a step takes {limit}, with "
            "scheduler.chunked_prefill off: turn it on, or raise scheduler.max_num_batched_tokens"
        )
    _expect_blocks(name, request, limit, cache, max_model_len)
    if request.parent:
        _expect_same_prompt(request, known.get(request.parent))


def _expect_blocks(
    name: str, request: Request, limit: int, cache: KVCacheManager, max_model_len: int
) -> None:
    """Check that the whole cache has room for the longest output of a request."""
    prompt = len(request.prompt)
    longest = min(prompt + request.params.most_tokens, max_model_len)
    # The keys and values of the last token are never computed.
    needed = cache.most_blocks(longest - 1, limit)
    there = cache.pool.num_blocks
    if needed > there:
        raise RequestError(
            f"{name} may grow to {longest} tokens, a prompt of {prompt} and an output of up to "
            f"{longest - prompt}, for which it needs {needed} blocks of {cache.block_size} tokens, "
            f"and the cache has {there}: lower max_tokens, or raise cache.memory_bytes or "
            "cache.memory_share"
        )


def _expect_same_prompt(request: Request, parent: Request | None) -> None:
    """Check that a request may share the blocks of its parent."""
    if parent is None:
        return
    ours = request.prompt, request.cache_salt, request.lora
    if (parent.prompt, parent.cache_salt, parent.lora) != ours:
        raise RequestError(
            f"request {request.request_id!r} has {parent.request_id!r} as its parent, which has "
            "another prompt, cache_salt or adapter, and would read another's cache: make both with "
            "Request.split"
        )
