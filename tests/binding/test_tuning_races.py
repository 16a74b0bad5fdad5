"""Which ops ``opgraft tune`` measures, and at which shapes."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from opgraft import CompilationConfig
from opgraft.errors import ConfigError, InputError
from opgraft.ops import MRotaryEmbedding, SiluAndMul
from opgraft.testing import tuning
from opgraft.testing.catalogue import SPECS

MINE = __name__.partition(".")[0]
"""By which the replacement here is chosen: the top-level module that it is of."""


def test_variants_are_measured_by_their_class() -> None:
    """A replacement of one variant makes a race of that one; others of the op keep what they have."""

    class Mine(MRotaryEmbedding):
        def forward_oot(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> Any:
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


def test_a_kernel_that_is_wrong_wins_no_race() -> None:
    """However fast, it is left out with what it does, and the others are measured."""

    class Half(SiluAndMul):
        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            return x[..., : x.shape[-1] // 2]

    SiluAndMul.register_oot(Half)
    (race,) = tuning.races(["silu_and_mul"])[0]
    outcome = tuning.run(race, [torch.float32], 1e-4)
    assert re.match(
        r"at silu_and_mul float32 its results are wrong: of inputs", outcome.left_out[MINE]
    )
    assert outcome.measured is not None
    assert outcome.measured.chosen == "native"


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
        rows, sizes = (
            max(of)
            for of in zip(*((math.prod(lead), size) for lead, size in spec.large), strict=True)
        )
        assert max(math.prod(lead) for lead, _ in shapes) <= 8 * rows, spec.functional.name
        assert max(size for _, size in shapes) <= sizes, spec.functional.name
