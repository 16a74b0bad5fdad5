"""Compile grafted models: ``torch.compile`` to one graph, and ``opgraft.compile`` to one that is recorded whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import opgraft
import torch
from opgraft import CompilationConfig

from on_gpu.device import DEVICE, ON_GPU
from on_gpu.expected import Expected, encoder, language_model
from on_gpu.rows import Rows

BACKEND = "inductor" if ON_GPU else "aot_eager"
TOLERANCE = 1e-3
"""The largest error in float32, as a share of the largest value."""


def run(rows: Rows, bundle: Path) -> None:
    expected = Expected.read(bundle)
    with rows.attempt("torch.compile of MiniLM") as row:
        model, _ = encoder(bundle, torch.float32, DEVICE)
        opgraft.graft(model)
        row.detail = _compare(model, expected.sentences, lambda output: output.last_hidden_state)
    with rows.attempt("torch.compile of SmolLM2") as row:
        model, _ = language_model(bundle, torch.float32, DEVICE)
        opgraft.graft(model)
        row.detail = _compare(
            model, expected.prompts, lambda output: output.logits, use_cache=False
        )
    with rows.attempt("opgraft.compile of a block, recorded whole") as row:
        row.detail = _recorded()
    if not ON_GPU:
        rows.no_device("code of Inductor for the GPU, and recorded kernels")


@torch.inference_mode()
def _compare(model: Any, sequences: list[list[int]], result: Any, **arguments: Any) -> str:
    """Compare a compiled model with itself uncompiled, for texts of several lengths; ``fullgraph`` allows one graph."""
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend=BACKEND, fullgraph=True, dynamic=True)
    worst = 0.0
    for ids in sequences[:4]:
        given = torch.tensor([ids], device=DEVICE)
        ours, plain = result(compiled(given, **arguments)), result(model(given, **arguments))
        worst = max(worst, _share(ours, plain))
    return f"one graph; error {worst:.1e} of the largest value"


class _Block(torch.nn.Module):
    """A norm, a product and an activation, as each layer of a language model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = opgraft.ops.RMSNorm(256)
        self.linear = torch.nn.Linear(256, 512)
        self.activation = opgraft.ops.SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self.activation(self.linear(self.norm(x)))
        return activated


@torch.no_grad()
def _recorded() -> str:
    block: Any = _Block().to(DEVICE)
    block.eval()
    settings = CompilationConfig(level=1, graph_mode="full", capture_sizes=(4, 16))
    compiled = opgraft.compile(block, settings, args=(torch.randn(4, 256, device=DEVICE),))
    worst = 0.0
    for batch in (1, 4, 3, 16, 9, 40, 4):
        x = torch.randn(batch, 256, device=DEVICE)
        worst = max(worst, _share(compiled(x), block(x)))
    return f"batches of 1 to 40; error {worst:.1e} of the largest value"


def _share(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """Return the error as a share of the largest value.

    Raises:
        AssertionError: it is above the tolerance, or no number.
    """
    share = float((ours.double() - plain.double()).abs().max() / plain.double().abs().max())
    if not share <= TOLERANCE:
        raise AssertionError(f"the error is {share:.1e} of the largest value, {TOLERANCE} allowed")
    return share
