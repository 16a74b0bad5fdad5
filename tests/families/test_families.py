"""One model of each family of transformers: tiny, random, plain against grafted. Run by ``make test-families``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
pytest.importorskip("transformers")

from opgraft import CustomOp, graft, ungraft
from opgraft.ops import ApplyRotaryEmb
from support.families.registry import families
from support.families.sweep import NotRun, build, floats, forward, gradients
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 5e-5
"""Of results, relative to the largest element of a tensor where that is above one. Most agree to 1e-6 and better; the
detectors grounding_dino and mm_grounding_dino, deep and of small weights, enlarge what is rounded otherwise to 3e-5."""

GRADIENT_TOLERANCE = 1e-3
"""Of gradients, relative to the largest element of each, as sums of many small terms are rounded apart."""

FAMILIES = families()


@pytest.fixture
def rotary_kernel() -> None:
    """A kernel for ``apply_rotary_emb``, without which the rotary functions of models are left to themselves."""

    @CustomOp.register_oot(name="ApplyRotaryEmb")
    class SameRotary(ApplyRotaryEmb):
        def forward_oot(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward_native(*args, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(
    family: str, rotary_kernel: None, record_property: Callable[[str, object], None]
) -> None:
    """Results and gradients agree, the state_dict is the same, and ungraft gives back every module and bit."""
    try:
        model, arguments = build(FAMILIES[family])
    except NotRun as verdict:
        pytest.skip(str(verdict))
    before, plain = floats(forward(model, arguments)), _gradients(model, arguments)
    modules, parameters = _modules(model), list(model.parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    record_property("class", type(model).__name__)

    report = graft(model)
    record_property("ops", json.dumps(Counter(row.op for row in report.replaced)))
    record_property(
        "sources", json.dumps(Counter(f"{row.source} {row.op}" for row in report.replaced))
    )
    _agree(floats(forward(model, arguments)), before)
    assert list(model.state_dict()) == list(state)
    _agree(list(model.state_dict().values()), list(state.values()), 0.0)
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
    grafted = _gradients(model, arguments)
    assert grafted.keys() == plain.keys()
    _agree(list(grafted.values()), list(plain.values()), GRADIENT_TOLERANCE, least=1e-3)

    ungraft(model)
    assert _modules(model) == modules
    _agree(floats(forward(model, arguments)), before, 0.0)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module, type, list[str]]]:
    named = model.named_modules(remove_duplicate=False)
    return [(name, module, type(module), sorted(vars(module))) for name, module in named]


def _gradients(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients, none for a model that cannot be differentiated at all."""
    try:
        return gradients(model, arguments)
    except (RuntimeError, AssertionError):
        return {}


def _agree(
    found: list[Tensor], wanted: list[Tensor], tolerance: float = TOLERANCE, least: float = 1.0
) -> None:
    """Raise ``AssertionError`` unless tensors agree to a tolerance relative to their largest element, or ``least``."""
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
        if not tolerance:
            assert torch.equal(mine, theirs)
        elif theirs.numel():
            largest = max(least, theirs.abs().max().item())
            assert (mine - theirs).abs().max().item() <= tolerance * largest
