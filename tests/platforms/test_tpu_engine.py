"""What an engine constructs on TPUs, as far as it can be seen without torch_xla."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from opgraft.config import ModelConfig, OpgraftConfig, ParallelConfig
from opgraft.distributed import groups
from opgraft.distributed.layout import ParallelLayout
from opgraft.engine.core import EngineCore
from opgraft.engine.workers.rank_places import RankPlaces
from opgraft.engine.workers.worker import Worker
from opgraft.errors import ConfigError, PlatformError
from opgraft.ops.embedding import VocabParallelEmbedding
from opgraft.ops.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from opgraft.platforms.tpu import engine
from opgraft.platforms.tpu.chips import one_chip
from opgraft.platforms.tpu.platform import TpuPlatform
from opgraft.platforms.tpu.runtime import Runtime
from opgraft.serving.embedding_engine import EmbeddingEngine
from torch import nn

ALONE = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A runtime that notes its calls, of the platform of this process."""
    platform = object.__new__(TpuPlatform)
    platform.runtime = Mock(spec=Runtime)
    monkeypatch.setattr(engine, "current_platform", lambda: platform)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return platform.runtime


def resolved(**parallel: int) -> OpgraftConfig:
    return OpgraftConfig(parallel=ParallelConfig(**parallel)).resolved()


def worker(local_rank: int = 0, local_size: int = 1, **parallel: int) -> Worker:
    return engine.TpuWorker(resolved(**parallel), local_rank, local_size)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"TPU_VISIBLE_CHIPS": "2", **ALONE}),
        ({"TPU_VISIBLE_CHIPS": "4, 5,6,7"}, {"TPU_VISIBLE_CHIPS": "6", **ALONE}),
        ({"TPU_VISIBLE_DEVICES": "1,2,3"}, {"TPU_VISIBLE_DEVICES": "3", **ALONE}),
    ],
)
def test_each_worker_has_a_chip(
    runtime: Mock, environ: dict[str, str], expected: dict[str, str]
) -> None:
    """A worker sees the chip of its rank on the host, of those that are visible, before the runtime takes any."""
    os.environ.update(environ)
    worker(2, 4).claim_devices()
    assert {
        name: value for name, value in os.environ.items() if name.startswith("TPU_")
    } == expected
    assert not runtime.mock_calls


def test_one_worker_has_all_that_is_visible(runtime: Mock) -> None:
    """Alone on its host, a worker changes nothing."""
    before = dict(os.environ)
    worker().claim_devices()
    assert os.environ == before


def test_a_worker_without_a_chip() -> None:
    """More workers than visible chips are an error that names the variable."""
    with pytest.raises(
        PlatformError, match=r"worker 2 .* no chip, as TPU_VISIBLE_CHIPS='0,1' shows 2: list a chip"
    ):
        one_chip(2, {"TPU_VISIBLE_CHIPS": "0,1"})


def test_several_chips_are_one_device(runtime: Mock) -> None:
    """A worker of several chips says so before anything asks for a device."""
    worker(devices_per_rank=4).claim_devices()
    assert [call[0] for call in runtime.mock_calls] == ["spread"]


def test_elsewhere_a_process_has_one_device() -> None:
    """A platform that knows no better refuses several devices for a rank, and says what does the same."""
    config = OpgraftConfig(parallel=ParallelConfig(devices_per_rank=2))
    for start in (EngineCore, EmbeddingEngine):
        with pytest.raises(
            ConfigError, match=r"parallel.devices_per_rank is 2, .* set parallel.tensor"
        ):
            start(config)


REFUSED: dict[str, tuple[dict[str, int], str]] = {
    "stages": ({"pipeline": 4}, "a program has the whole model, and no stage of it"),
    "experts": ({"data": 4, "expert": 4}, "ranks exchange rows of experts outside of programs"),
    "processes of several chips": (
        {"tensor": 4, "devices_per_rank": 2},
        "a process of several chips joins no other process",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_programs_cannot_compute_is_refused(runtime: Mock, case: str) -> None:
    """The message says why, and what shares a model among chips."""
    split, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"{reason}: .* parallel.devices_per_rank to 4"):
        engine.TpuWorker.expect_split(resolved(**split).parallel)


def test_ranks_share_a_model_if_the_runtime_lets_them(runtime: Mock) -> None:
    """A runtime such as XLA's CPU client gives its reason, and none is asked for replicas."""
    runtime.why_alone.return_value = ""
    engine.TpuWorker.expect_split(resolved(tensor=4).parallel)
    runtime.why_alone.return_value = "this client is alone"
    with pytest.raises(ConfigError, match=r"this client is alone: .*devices_per_rank to 4"):
        engine.TpuWorker.expect_split(resolved(tensor=4).parallel)
    engine.TpuWorker.expect_split(resolved(data=4).parallel)


def test_a_rank_enters_the_slice_before_the_runtime_starts(runtime: Mock) -> None:
    """The variables are there when the runtime is told to start; its own numbering must be that of the ranks."""
    seen: list[str | None] = []
    runtime.enter_job.side_effect = lambda: seen.append(os.environ.get("CLOUD_TPU_TASK_ID"))
    runtime.number_in_slice.return_value = None
    places = RankPlaces(1, ("localhost",) * 2, (0, 1), ("0", "1"))
    engine.TpuWorker.enter_job(places)
    assert seen == ["1"]
    runtime.number_in_slice.return_value = 1
    engine.TpuWorker.enter_job(places)
    runtime.number_in_slice.return_value = 0
    with pytest.raises(PlatformError, match=r"rank 1 as number 0 of the slice.*TPU_WORKER_ID"):
        engine.TpuWorker.enter_job(places)


def test_a_chip_of_a_slice_is_claimed_once(runtime: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a job has its chip already."""
    alone = groups.ALONE
    of_two = replace(alone, layout=ParallelLayout(2))
    monkeypatch.setattr(engine, "parallelism", lambda: of_two)
    before = dict(os.environ)
    worker(1, 2, tensor=2).claim_devices()
    assert os.environ == before


def test_the_number_of_a_host_is_read(runtime: Mock) -> None:
    """Ranks of the first host come first; a value that is no number is told."""
    assert engine.TpuWorker.host_number() == 0
    os.environ["TPU_WORKER_ID"] = "3"
    assert engine.TpuWorker.host_number() == 3
    os.environ["TPU_WORKER_ID"] = "first"
    with pytest.raises(PlatformError, match=r"TPU_WORKER_ID='first' is no number of a host"):
        engine.TpuWorker.host_number()


def test_a_runtime_that_cannot_spread() -> None:
    """A package without it says what to use."""
    one = torch.ones(2)
    for call in (
        Runtime.spread,
        lambda own: Runtime.shard(own, one, 0),
        lambda own: Runtime.placing(own, 1, 0),
    ):
        with pytest.raises(PlatformError, match=r"torch_xla|does not divide"):
            call(Mock(spec=Runtime))


def test_weights_are_divided_as_among_ranks() -> None:
    """Columns by outputs, rows by inputs, vocabularies by tokens; what does not divide stays whole."""
    model = nn.ModuleDict(
        {
            "column": ColumnParallelLinear(8, 12, bias=True, prefix="column"),
            "row": RowParallelLinear(8, 12, bias=True, prefix="row"),
            "odd": RowParallelLinear(6, 12, bias=False, prefix="odd"),
            "whole": ReplicatedLinear(8, 12, bias=True, prefix="whole"),
            "tokens": VocabParallelEmbedding(128, 8, prefix="tokens"),
        }
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    divided = {names[id(parameter)]: dim for parameter, dim in engine.divided_weights(model, 4)}
    assert divided == {"column.weight": 0, "column.bias": 0, "row.weight": 1, "tokens.weight": 0}


def test_compilations_are_counted_by_whom_can(runtime: Mock) -> None:
    """Where the package has no counter, the runner counts what it had compiled."""
    runner = engine.TpuModelRunner(
        OpgraftConfig(model=ModelConfig(name="none")).resolved(), torch.device("cpu")
    )
    runner.built, runtime.compilations.return_value = 3, 7
    assert runner.compilations() == 7
    runtime.compilations.side_effect = PlatformError("no counter")
    assert runner.compilations() == 3


def test_the_parts_are_for_this_platform_only(tmp_path: Path) -> None:
    """Elsewhere they say whose they are."""
    with pytest.raises(PlatformError, match="is for the platform tpu, and the current one is cpu"):
        engine.TpuModelRunner(replace(OpgraftConfig()).resolved(), torch.device("cpu"))
