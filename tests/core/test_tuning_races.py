"""Which ops ``opgraft bench --tune`` measures, and at which shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from opgraft import CompilationConfig
from opgraft.errors import ConfigError, InputError
from opgraft.ops import MRotaryEmbedding
from opgraft.testing import tuning
from opgraft.testing.catalogue import SPECS

MINE = __name__.partition(".")[0]
"""By which the replacement here is chosen: the top-level module that it is of."""


def test_variants_are_measured_by_their_class() -> None:
    """A replacement of one variant makes a race of that one; others of the op keep what they have."""

    class Mine(MRotaryEmbedding):
        def forward_oot(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
            return self.forward_native(positions, query, key)

    MRotaryEmbedding.register_oot(Mine)
    found, left_out = tuning.races(["rotary_embedding"])
    assert [(race.name, race.op, [*race.candidates]) for race in found] == [
        ("MRotaryEmbedding", "rotary_embedding", [MINE, "native"])
    ]
    assert left_out == {"RotaryEmbedding": "native is the only candidate here"}
    assert [race.name for race in tuning.races()[0]] == ["MRotaryEmbedding", *_of_opgraft()]


def _of_opgraft() -> list[str]:
    """Ops that have a kernel of opgraft's own on this machine."""
    return [race.name for race in tuning.races()[0] if race.name != "MRotaryEmbedding"]


def test_names_that_nothing_has_are_refused() -> None:
    """A misspelt op is an error with what is near, here as in the settings."""
    with pytest.raises(InputError, match="no op is called 'relu_2': did you mean 'relu2'"):
        tuning.races(["relu_2"])
    assert tuning.races(["experts"]) == ([], {"experts": "no functional form has inputs for it"})
    with pytest.raises(ConfigError, match="both 'all' and 'auto'"):
        CompilationConfig(custom_ops=["auto", "all"])


def test_shapes_are_realistic_and_bounded() -> None:
    """Every form has shapes to be timed at; none has far more rows than those that its proof calls large."""
    for spec in SPECS.values():
        shapes = tuning.shapes(spec)
        assert shapes, spec.functional.name
        rows, sizes = (max(of) for of in zip(*((math.prod(lead), size) for lead, size in spec.large), strict=True))
        assert max(math.prod(lead) for lead, _ in shapes) <= 8 * rows, spec.functional.name
        assert max(size for _, size in shapes) <= sizes, spec.functional.name
