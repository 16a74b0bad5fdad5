"""The step that ``opgraft plan`` tells of two ranks of this machine, against the real one, from figures measured here.

Both ranks measure at once, as they share the memory of the host: how fast weights are read by a product with as many
rows as the step has, how fast products of large matrices are, the time of small and large sums over both, and what a
layer takes that has hardly any weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from engine_rows import Finding
from opgraft.config import CacheConfig, LoadConfig, ModelConfig, OpgraftConfig, ParallelConfig
from opgraft.distributed import get_tp_group, init_distributed
from opgraft.distributed.layout import ParallelLayout
from opgraft.engine.core import EngineCore
from opgraft.engine.planning.estimate import Seconds, seconds_of
from opgraft.engine.planning.shard import Shard
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from opgraft.machine.device_figures import DeviceFigures
from torch import multiprocessing
from torch.nn import functional

RANKS, LAYERS, BATCH, CONTEXT, STEPS = 2, 6, 8, 64, 24
MOST_ERROR = 0.3
"""Of the measured time of a step, by which the estimate may be off."""


def write_model(folder: Path, hidden: int) -> Path:
    """Write a random Llama."""
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def config_of(folder: Path) -> OpgraftConfig:
    return OpgraftConfig(
        model=ModelConfig(name=str(folder), dtype="float32"),
        cache=CacheConfig(num_blocks=256),
        load=LoadConfig(progress=False),
        parallel=ParallelConfig(tensor=RANKS, executor="in_process"),
    ).resolved()


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    """Return the median time of a call, which both ranks begin together."""
    taken = []
    for _ in range(rounds):
        get_tp_group().all_reduce(torch.zeros(1))
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def step_seconds(folder: Path) -> float:
    """Return the median time that the runner takes for the model in a step of ``BATCH`` tokens."""
    core = EngineCore(config_of(folder))
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    core.add(
        [Request(f"r{row}", [row + 3] * (CONTEXT - STEPS // 2), params) for row in range(BATCH)]
    )
    core.step()
    taken = []
    for _ in range(STEPS - 2):
        before = core.stats().counters.seconds.get("model", 0.0)
        core.step()
        taken.append(core.stats().counters.seconds["model"] - before)
    core.shutdown()
    return statistics.median(taken[2:])


def figures(tiny: Path) -> DeviceFigures:
    """Measure what a rank of this machine can do."""
    group = get_tp_group()
    weights = [torch.randn(1024, 1024) for _ in range(64)]
    rows, square, large = torch.randn(BATCH, 1024), torch.randn(1024, 1024), torch.zeros(1 << 21)
    small = torch.zeros(BATCH, 64)
    reading = median_seconds(lambda: [functional.linear(rows, weight) for weight in weights], 7)
    product = median_seconds(lambda: square @ square, 7)
    latency = median_seconds(lambda: group.all_reduce(small), 101) / 2
    link = large.nbytes / (median_seconds(lambda: group.all_reduce(large), 7) - 2 * latency)
    bare = DeviceFigures(
        "this machine",
        memory=1 << 40,
        bandwidth=len(weights) * weights[0].nbytes / reading,
        flops={"float32": 2 * 1024**3 / product},
        link=link,
        latency=latency,
    )
    shard = Shard(config_of(tiny), ParallelLayout(RANKS), group.rank_in_group)
    spent = seconds_of(
        shard, shard.step(BATCH, CONTEXT), ParallelLayout(RANKS), group.rank_in_group, bare
    ).total
    rest = max(0.0, step_seconds(tiny) - spent) / LAYERS
    return DeviceFigures(**{**vars(bare), "layer_seconds": rest})


def measure(rank: int, store: str, tiny: Path, model: Path, told: Any) -> None:
    """Compare estimate and step on one of the ranks."""
    torch.set_num_threads(1)
    init_distributed(tensor=RANKS, rank=rank, init_method=f"file://{store}")
    device = figures(tiny)
    layout = ParallelLayout(RANKS)
    shard = Shard(config_of(model), layout, rank)
    estimate = seconds_of(shard, shard.step(BATCH, CONTEXT), layout, rank, device)
    told.put((rank, device, estimate, step_seconds(model)))


def plan(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Run two ranks, and compare the estimate of each with its step."""
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny, model = write_model(folder / "tiny", 64), write_model(folder / "model", 1536)
        processes = [
            context.Process(target=measure, args=(rank, str(folder / "store"), tiny, model, told))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        results = [told.get() for _ in processes]
        for process in processes:
            process.join()
    for found in sorted(results, key=lambda each: each[0]):
        yield finding_of(*found)


def finding_of(rank: int, device: DeviceFigures, estimate: Seconds, measured: float) -> Finding:
    """Return the finding of a rank, with the figures that its estimate is made of."""
    detail = (
        f"{estimate.total * 1e3:.2f} ms of {measured * 1e3:.2f}: weights {estimate.weights * 1e3:.2f}, cache "
        f"{estimate.cache * 1e3:.2f}, sums {estimate.collectives * 1e3:.2f}, layers {estimate.layers * 1e3:.2f}; "
        f"{device.bandwidth / 1e9:.1f} GB/s, {device.flops['float32'] / 1e9:.0f} GFLOPS, link "
        f"{device.link / 1e9:.2f} GB/s after {device.latency * 1e6:.0f} µs"
    )
    error = abs(estimate.total - measured) / measured
    return Finding(f"error of the estimated step, rank {rank}", error, detail, most=MOST_ERROR)
