"""Random inputs are the same in every run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.default_generator.manual_seed(
        2026
    )  # torch.manual_seed notes a traceback for each kind of device as well
