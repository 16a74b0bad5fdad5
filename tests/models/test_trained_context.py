"""The longest context that a config says its model was made for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from opgraft.models.context import trained_context

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": 2048}, 2048),
        (
            {
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            2048,
        ),
        (
            {"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}},
            8192,
        ),
        (
            {
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
            },
            4096,
        ),
        ({"max_position_embeddings": 4096, "rope_parameters": YARN}, 4096),
        ({"max_position_embeddings": 1024, "rope_parameters": YARN}, 4096),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0},
            },
            131072,
        ),
        ({"max_position_embeddings": 1024, "rope_parameters": {"full": YARN, "sliding": {}}}, 4096),
    ],
)
def test_scaled_ropes_count(values: dict[str, Any], expected: int | None) -> None:
    """Linear, dynamic and YaRN scaling lengthen what the config says, unless it says the longer one already."""
    assert trained_context(SimpleNamespace(**values)) == expected
