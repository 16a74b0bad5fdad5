"""Readers of an engine whose worker, a process of its own, is lost in the middle of its steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine.test_worker_process import process_of
from opgraft.errors import EngineError
from opgraft.serving.async_llm import AsyncLLM
from serving.test_async_llm import LONG, checkpoint, last, prompts, run

__all__ = ["checkpoint"]


@pytest.mark.usefixtures("warm_workers")
def test_a_worker_that_is_killed_is_told_to_every_reader(checkpoint: Path) -> None:
    """Streams in the step, in the queue and of later requests end with the status; what was read before stays."""

    async def use(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(last(llm.generate(prompt, LONG))) for prompt in prompts(20)]
        while llm.stats().counters.decode_tokens < 9:
            await asyncio.sleep(0)
        process_of(llm.engine.core.executor).kill()  # type: ignore[arg-type]
        found = [(await task).outputs[0] for task in tasks]
        assert {output.finish_reason for output in found} == {"error"}
        assert all(
            "process of the worker has ended, with the status -9" in str(output.error)
            for output in found
        )
        assert (
            0
            == min(len(output.token_ids) for output in found)
            < max(len(output.token_ids) for output in found)
        )
        for later in (last(llm.generate([5], LONG)), llm.check_health()):
            with pytest.raises(EngineError, match="with the status -9"):
                await later

    run(checkpoint, use, **{"parallel.executor": "processes"})
