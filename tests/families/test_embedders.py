"""One model of each architecture that ``LLM`` may take to embed: tiny, random, beside transformers' own vectors.

Run by ``make test-embedders``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
pytest.importorskip("transformers")

from opgraft.errors import OpgraftError
from support.families.embedders import build, cases, embedded, opened, save
from support.families.sweep import NotRun

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = cases()


@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[" ".join([name, *options]) for name, options in CASES]
)
def test_vectors_are_those_of_transformers(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Each text has transformers' vector, alone and in a batch, or the model is refused by name before any text."""
    try:
        model, rows, expected = build(name, options)
    except NotRun as verdict:
        pytest.skip(f"not built or not run: {verdict}")
    save(model, tmp_path)
    try:
        llm = opened(tmp_path)
    except OpgraftError as error:
        pytest.skip(f"refused: {error}")
    alone, batch = embedded(llm, rows)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(batch, expected, rtol=0, atol=1e-4)
