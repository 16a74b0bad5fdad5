"""Row of the ops' benchmark: the pause between two steps in which experts change their place, over a step.

Two ranks share the experts of a stack of layers. The router likes the experts of one of them, so that a balancer moves
some. A step is the layers of experts alone: with attention it would take longer, and the pause would not.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from opgraft.distributed import destroy_distributed, init_distributed
from opgraft.engine.runner.expert_balancer import ExpertBalancer
from opgraft.ops import FusedMoE
from opgraft.ops.weights import process_weights_after_loading
from timing import Row
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

LAYERS, EXPERTS, CHOSEN, HIDDEN = 16, 16, 2, 512
TOKENS = 16
STEPS, PLACEMENTS, MOVES = 8, 2, 4
LIMIT = 1.0


def rows() -> Iterator[Row]:
    """Measure the steps in which experts move, and those in which none does."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_measure, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
        pauses, steps = torch.load(Path(folder) / "seconds")
    pause, step = statistics.median(pauses), statistics.median(steps)
    longer = sum(each > step for each in pauses)
    detail = f"{pause * 1e3:.3g} ms, at most {max(pauses) * 1e3:.3g}, over {step * 1e3:.3g} ms of {TOKENS} tokens"
    detail += f"; {longer} of {len(pauses)} pauses are longer"
    yield Row("pause in which experts move / step", round(pause / step, 4), LIMIT, detail)


def _measure(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    init_distributed(tensor=2, rank=rank, init_method=f"file://{folder}/store")
    with torch.inference_mode():
        layers = nn.ModuleList(_layer(number) for number in range(LAYERS))
        balancer = ExpertBalancer(layers, STEPS, MOVES)
        pauses, steps = [], []
        for liked in range(PLACEMENTS):
            bias = torch.zeros(EXPERTS)
            bias[
                torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(liked))[
                    : EXPERTS // 2
                ]
            ] = 4
            for number in itertools.count(1):
                steps.append(_step(layers, bias))
                moves, started = bool(balancer.waiting), time.perf_counter()
                balancer.after_step()
                if moves:
                    pauses.append(time.perf_counter() - started)
                elif number > STEPS:
                    break
    if rank == 0:
        torch.save((pauses, steps), Path(folder) / "seconds")
    destroy_distributed()


def _layer(number: int) -> FusedMoE:
    layer = FusedMoE(
        EXPERTS,
        CHOSEN,
        HIDDEN,
        HIDDEN,
        torch.float32,
        ep_size=2,
        enable_eplb=True,
        prefix=f"{number}",
    )
    for weight in layer.parameters():
        weight.normal_(0, 0.02)
    process_weights_after_loading(layer)
    return layer


def _step(layers: Any, bias: Tensor) -> float:
    x = torch.randn(TOKENS, HIDDEN)
    torch.distributed.barrier()
    started = time.perf_counter()
    for layer in layers:
        x = layer(x, torch.randn(TOKENS, EXPERTS) + bias)
    return time.perf_counter() - started
