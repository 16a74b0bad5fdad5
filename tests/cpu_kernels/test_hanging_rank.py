"""A rank that hangs among fused layers, which the other ranks wait for in native code."""

from __future__ import annotations

import re
from pathlib import Path

import opgraft
import pytest
from conftest import Site
from opgraft import SamplingParams
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from support.engines import prompts, replaced, settings
from support.random_decoders import written

HANGING = """
import time
import opgraft
from opgraft.distributed import get_world_group
from opgraft.engine.workers.worker import Worker

platforms = "any"


class Hanging(Worker):
    def hang(self, rank):
        from opgraft_cpu_kernels import decoder

        if get_world_group().rank == rank:
            decoder._Bound.run = lambda *_: time.sleep(1000)


@opgraft.hookimpl
def opgraft_register_ops(platform):
    Worker.register_oot(Hanging)
"""


def test_the_one_that_hangs_is_named(plugin: Path, site: Site, tmp_path: Path) -> None:
    """No stack of Python tells that the other one waits for it: the name of its thread does."""
    # Ordinary workers, not warm ones: the system has a thread's name under the process that runs it.
    import opgraft_cpu_kernels

    if opgraft_cpu_kernels.path() == "scalar":
        pytest.skip("this CPU lacks AVX2, without which no plan fuses layers")
    site.plugin("hanging-worker", HANGING)
    opgraft.reset()
    written(
        "Llama",
        tmp_path / "model",
        hidden_size=192,
        intermediate_size=128,
        head_dim=32,
        num_attention_heads=4,
    )
    given = {"executor": "processes", "tensor": 2, "step_seconds": 3.0}
    core = EngineCore(
        replaced(
            settings(tmp_path / "model"), cache={"block_size": 16, "num_blocks": 24}, parallel=given
        )
    )
    core.executor.call_all("hang", 1)
    core.add([Request("a", prompts(3)[0], SamplingParams(max_tokens=2))])
    (news,) = core.step()
    core.shutdown()
    assert re.search(r"rank 1 \(step 1\) did not come .*, and rank 0 wait", str(news.error)), (
        news.error
    )
    assert "rank 0 (" not in str(news.error)
