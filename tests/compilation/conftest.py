"""Models that compile in a moment, and a backend that counts its graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.blocks import WIDTH, Block
from support.ranks import Ranks
from torch import fx


@pytest.fixture(scope="package")
def two() -> Iterator[Ranks]:
    """Two ranks that share layers."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def block() -> Block:
    """A block with random weights, in evaluation mode."""
    model = Block().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)  # so that no sum is large
    return model


@pytest.fixture
def x() -> torch.Tensor:
    """Input for the block."""
    return torch.randn(3, 5, WIDTH)


@pytest.fixture
def counting() -> Iterator[list[fx.GraphModule]]:
    """The graphs that the backend of the name ``counting`` was given; it runs them as they are."""
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, example: Any) -> Any:
        graphs.append(module)
        return module.forward

    known = torch._dynamo.backends.registry
    known.lookup_backend("eager")  # imports all the others, which would be forgotten with this one
    with (
        patch.dict(known._BACKENDS),
        patch.dict(known._COMPILER_FNS),
    ):  # a name that is registered is so for good
        known.register_backend(backend, name="counting")
        yield graphs
