"""Calls of event loops in threads of their own."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from opgraft.base.timeline import phase
from opgraft.errors import EngineError

_T = TypeVar("_T")


async def called_in(pool: ThreadPoolExecutor, function: Callable[..., _T], *args: object) -> _T:
    """Call a function in a thread of a pool, and return its result.

    The thread has a copy of the caller's context.

    Raises:
        EngineError: the pool was shut down.
    """
    with phase("wait"):
        # A pool's thread has no context of its own, and would miss settings and timelines.
        call = partial(contextvars.copy_context().run, _prepared, function, *args)
        try:
            future = asyncio.get_running_loop().run_in_executor(pool, call)
        # Raised by a pool after its shutdown.
        except RuntimeError as error:
            raise EngineError("the engine was shut down: make a new one") from error
        return await future


@phase("prepare")
def _prepared(function: Callable[..., _T], *args: object) -> _T:
    return function(*args)
