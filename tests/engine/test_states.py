"""Models whose layers carry a state: the right tokens, whatever else is in the batch, and slots that are clean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.engines import engine, expect_right, prompts, recorded, serve
from random_decoders import hybrid

FAMILIES = ["lfm2", "mamba", "mamba2"]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A small model of transformers whose checkpoint is in the folder."""
    return hybrid(request.param, tmp_path)


def test_tokens_are_right_beside_others(model: Any, tmp_path: Path) -> None:
    """Prompts of several lengths, more than run at once and in chunks, have the tokens that transformers finds."""
    given = [recorded(f"r{number}", prompt) for number, prompt in enumerate(prompts(5, 1, 17, 9, 30, 3))]
    core = engine(tmp_path, max_num_batched_tokens=11)
    serve(core, [request for request, _ in given])
    for request, recorder in given:
        expect_right(model, request, recorder)
