"""Models whose layers carry a state, on two ranks: the tokens and logits of one, each rank with its part of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.errors import LayerError
from opgraft.models import load_model
from support.engines import engine, prompts, recorded, serve, settings
from support.random_decoders import HYBRIDS, hybrid
from support.ranks import Ranks

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in HYBRIDS},
    "bamba, ranks share a group": ("bamba", {"mamba_n_groups": 1}),
    "mamba2, ranks share a group": ("mamba2", {"n_groups": 1}),
    "mamba2, groups across ranks": ("mamba2", {"n_groups": 6}),
    "plamo2, ranks share a key head": ("plamo2", {"num_key_value_heads": 1}),
}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def served(folder: str) -> tuple[list[list[int]], list[torch.Tensor], dict[str, int]]:
    """Outputs and logits of requests in chunks beside each other, and the bytes of what was loaded and of a state."""
    core = engine(Path(folder), max_num_batched_tokens=11, num_blocks=24, max_model_len=40)
    given = [
        recorded(f"r{number}", prompt, 20) for number, prompt in enumerate(prompts(5, 17, 9, 3))
    ]
    serve(core, [request for request, _ in given])
    runner = core.executor.worker.runner
    sizes = {name: value.nbytes for name, value in runner.model.named_parameters()}
    sizes["state"] = runner.layout.bytes_per_state
    return (
        [request.output for request, _ in given],
        [torch.stack(list(recorder.logits.values())) for _, recorder in given],
        sizes,
    )


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, tmp_path: Path, two: Ranks) -> None:
    """Two ranks give the tokens and logits of one; each has half of the states, and of the weights that are cut."""
    family, values = CASES[name]
    hybrid(family, tmp_path, **values)
    outputs, logits, whole = served(str(tmp_path))
    for found, there, sizes in two.run(served, str(tmp_path)):
        assert found == outputs
        for ours, theirs in zip(there, logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        shared = "share" in name
        assert sizes["state"] * (1.7 if shared else 2) <= whole["state"]
        halved = [key for key, size in sizes.items() if 2 * size == whole[key]]
        for part in (
            "conv.",
            "conv1d.",
            "in_proj.",
            "out_proj.",
            ".A",
            ".D",
            "bcdt_proj",
            "gate_up",
            "down_proj",
        ):
            cut = [
                key
                for key in whole
                if part in key and not (shared and part in ("conv1d.", "in_proj."))
            ]
            assert all(
                key in halved for key in cut if not key.endswith(("out_proj.bias", "o_proj.bias"))
            )


def refused(folder: str) -> str:
    with pytest.raises(LayerError) as caught:
        load_model(settings(Path(folder)))
    return str(caught.value)


def test_groups_that_ranks_cannot_share(tmp_path: Path, two: Ranks) -> None:
    """Three groups of heads on two ranks, and heads that they do not divide, are refused in numbers."""
    hybrid("mamba2", tmp_path / "groups", n_groups=3)
    for told in two.run(refused, str(tmp_path / "groups")):
        assert "2 tensor-parallel ranks cannot share 3 parts" in told
    hybrid("mamba2", tmp_path / "heads", num_heads=3, head_dim=32, n_groups=1)
    for told in two.run(refused, str(tmp_path / "heads")):
        assert "num_heads of a mixer is 3, which 2 tensor-parallel ranks do not divide" in told
