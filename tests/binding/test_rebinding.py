"""Deciding anew for existing models."""

from __future__ import annotations

import opgraft
import pytest
import torch
from opgraft import CompilationConfig, CustomOp, OpgraftConfig, rebind, set_config
from opgraft.errors import ConflictError
from torch import nn
from torch.nn.utils import parametrize


def test_rebind_follows_settings_and_replacements_and_keeps_parameters(scale, fast_scale) -> None:
    """An existing op takes the replacement and goes back, with the same parameter object throughout."""
    model = nn.Sequential(scale())
    weight = model[0].weight
    scale.register_oot(fast_scale)
    assert [(row.path, row.before, row.after) for row in rebind(model)] == [
        ("0", "Scale.forward_cpu", "FastScale.forward_oot")
    ]
    assert model[0].op_class is fast_scale
    CustomOp.unregister_oot(fast_scale)
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        (row,) = rebind(model)
    assert (row.before, row.after) == ("FastScale.forward_oot", "Scale.forward_native")
    assert model[0].op_class is scale
    assert model[0].weight is weight


def test_a_replacement_of_the_same_name_is_a_change(scale) -> None:
    """A class that is called as the one that it replaces, and overrides the same method, is told all the same."""

    def forward_cpu(
        self: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x

    namesake = type(
        "Scale", (scale,), {"__module__": "acme", "forward_cpu": forward_cpu}
    )  # no variant of the op
    model = nn.Sequential(scale())
    scale.register_oot(namesake)
    assert [(row.path, row.reason) for row in rebind(model)] == [("0", "")]
    assert model[0].op_class is namesake
    assert rebind(model) == []


def test_going_back_after_the_plugin_is_gone(scale, fast_scale) -> None:
    """After a reset the declared target tells which class the op came from."""
    scale.register_oot(fast_scale)
    model = nn.Sequential(scale())
    opgraft.reset()
    (row,) = rebind(model)
    assert (row.before, row.after) == ("FastScale.forward_oot", "Scale.forward_cpu")
    assert model[0].op_class is scale


def test_a_replacement_with_its_own_constructor_is_not_forced_on_an_op(scale) -> None:
    """Its constructor never ran for the existing op, so the op stays and the row says why."""

    class Prepared(scale):
        def __init__(self, size=4, factor=2.0, *, enforce_enable=False):
            super().__init__(size, factor, enforce_enable=enforce_enable)
            self.table = torch.ones(size)

        def forward_oot(self, x, bias=None):
            return x * self.table

    model = nn.Sequential(scale())
    scale.register_oot(Prepared)
    (row,) = rebind(model)
    assert "Prepared defines __init__" in row.reason
    assert model[0].op_class is scale
    made = nn.Sequential(scale())
    opgraft.reset()
    (row,) = rebind(made)
    assert "Prepared defines __init__" in row.reason
    assert made[0].op_class is Prepared


def test_nothing_to_change_gives_no_rows(scale) -> None:
    """Only ops that changed, or could not, are listed."""
    assert rebind(nn.Sequential(scale(), nn.Linear(4, 4))) == []


def test_enforced_ops_stay_enabled(scale) -> None:
    """An op constructed with enforce_enable keeps it."""
    model = nn.Sequential(scale(enforce_enable=True))
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        assert rebind(model) == []
    assert model[0].decision.chosen == "Scale.forward_cpu"


def test_classes_that_torch_derived_are_left_alone(scale, fast_scale) -> None:
    """A parametrized op's class is not ours to assign."""
    model = nn.Sequential(scale())
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    scale.register_oot(fast_scale)
    (row,) = rebind(model)
    assert "parametrization" in row.reason


def test_a_choice_that_raises_changes_nothing(scale, fast_scale) -> None:
    """A conflict over one op leaves every op of the model as it was."""

    @CustomOp.register("other")
    class Other(CustomOp):
        def forward_native(self, x):
            return x

    model = nn.Sequential(scale(), Other())
    scale.register_oot(fast_scale)
    for name in ("One", "Two"):
        Other.register_oot(type(name, (Other,), {"forward_oot": lambda self, x: x}))
    with pytest.raises(ConflictError, match="One"):
        rebind(model)
    assert model[0].op_class is scale


def test_a_forward_on_the_instance_is_left_alone(scale, fast_scale) -> None:
    """Code that hangs its own forward on an op hides what the class binds; the row says so."""
    model = nn.Sequential(scale())
    model[0].forward = lambda x: x
    scale.register_oot(fast_scale)
    (row,) = rebind(model)
    assert "replaced on the instance" in row.reason
