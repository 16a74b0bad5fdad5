"""Graft both checkpoints: outputs against the plain model and against the CPU, and which kernels ran, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opgraft
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from on_gpu.device import DEVICE, ON_GPU
from on_gpu.expected import Expected, encoder, language_model
from on_gpu.rows import Rows

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""The largest error, as a share of the largest value, by dtype."""

PREFIX = "opgraft."


def run(rows: Rows, bundle: Path) -> None:
    expected = Expected.read(bundle)
    for dtype in TOLERANCES:
        name = str(dtype).removeprefix("torch.")
        with rows.attempt(f"MiniLM in {name}"):
            model, _ = encoder(bundle, dtype, DEVICE)
            _compare(rows, f"MiniLM in {name}", model, dtype, lambda m: _states(m, expected))
        with rows.attempt(f"SmolLM2 in {name}"):
            model, _ = language_model(bundle, dtype, DEVICE)
            _compare(rows, f"SmolLM2 in {name}", model, dtype, lambda m: _logits(m, expected))
    if not ON_GPU:
        rows.no_device("kernels of the GPU")


def _states(model: Any, expected: Expected) -> list[tuple[Tensor, Tensor]]:
    """Return the last hidden states of each sentence, and what the CPU computed."""
    pairs = []
    for ids, states in zip(expected.sentences, expected.states, strict=True):
        output = model(torch.tensor([ids], device=DEVICE))
        pairs.append((output.last_hidden_state[0], states))
    return pairs


def _logits(model: Any, expected: Expected) -> list[tuple[Tensor, Tensor]]:
    """Return the logits at the end of each prompt, and what the CPU computed."""
    pairs = []
    for ids, logits in zip(expected.prompts, expected.logits, strict=True):
        output = model(torch.tensor([ids], device=DEVICE))
        pairs.append((output.logits[0, -1], logits))
    return pairs


@torch.inference_mode()
def _compare(
    rows: Rows,
    name: str,
    model: Any,
    dtype: torch.dtype,
    outputs: Callable[[Any], list[tuple[Tensor, Tensor]]],
) -> None:
    """Compare the outputs of a model before and after it is grafted; the first of each pair is the model's."""
    plain = outputs(model)
    report = opgraft.graft(model)
    with opgraft.profile(), torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiled:
        grafted = outputs(model)
    tolerance = TOLERANCES[dtype]
    with rows.attempt(f"{name}: grafted against plain") as row:
        row.detail = f"{len(report.replaced)} modules replaced; "
        row.detail += _expect_close(grafted, [ours for ours, _ in plain], tolerance)
    with rows.attempt(f"{name}: grafted against the CPU in float32") as row:
        row.detail = _expect_close(grafted, [theirs for _, theirs in plain], tolerance)
    with rows.attempt(f"{name}: kernels that ran") as row:
        calls = Counter[str]()
        for event in profiled.key_averages():
            if event.key.startswith(PREFIX):
                calls[event.key.removeprefix(PREFIX)] += event.count
        row.detail = "; ".join(f"{count} x {kernel}" for kernel, count in calls.most_common())
        if ON_GPU and not any("forward_cuda" in kernel for kernel in calls):
            raise AssertionError(f"no kernel of the GPU ran: {row.detail}")


def _expect_close(
    grafted: list[tuple[Tensor, Tensor]], expected: list[Tensor], tolerance: float
) -> str:
    """Return the largest error as a share of the largest value.

    Raises:
        AssertionError: it is above the tolerance, or no number.
    """
    worst = 0.0
    for (ours, _), theirs in zip(grafted, expected, strict=True):
        difference = ours.double().cpu() - theirs.double().cpu()
        share = float(difference.abs().max() / theirs.double().abs().max())
        if not share <= tolerance:
            raise AssertionError(
                f"the error is {share:.1e} of the largest value, {tolerance} allowed"
            )
        worst = max(worst, share)
    return f"error {worst:.1e} of the largest value"
