"""Modules that process their weights after loading: whoever has the method is called, plugins' replacements too."""

from __future__ import annotations

from functools import partial

import opgraft
import pytest
import torch
from opgraft.errors import WeightError
from opgraft.models import load_weights
from opgraft.ops import RMSNorm
from opgraft.ops.weights import process_weights_after_loading
from torch import nn

PLUGIN = """
from opgraft.ops import RMSNorm
platforms = "any"
@RMSNorm.register_oot
class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return self.doubled * x
    def process_weights_after_loading(self):
        {body}
        self.doubled = 2 * self.weight.detach()
"""
RELEASED = "    def release_weights(self):\n        vars(self).pop('doubled', None)\n"


class Told(nn.Module):
    """A module that notes when its hook runs, and which of its weights are there by then."""

    def __init__(self, told: list[str], name: str, **children: nn.Module) -> None:
        super().__init__()
        self.told, self.name = told, name
        for key, child in children.items():
            self.add_module(key, child)

    def process_weights_after_loading(self) -> None:
        loaded = all(bool((weight == 2).all()) for weight in self.parameters())
        self.told.append(self.name if loaded else f"{self.name} too early")


def of_told(told: list[str]) -> Told:
    """A model in which the module in the middle has a weight, and the one inside it has none."""
    middle = Told(
        told, "middle", idle=Told(told, "idle"), inner=Told(told, "inner", linear=nn.Linear(3, 3))
    )
    middle.weight = nn.Parameter(torch.zeros(3))
    return Told(told, "top", middle=middle, last=nn.Linear(2, 2), empty=Told(told, "empty"))


def test_any_module_is_called_once_after_those_inside_it() -> None:
    """A module is called when it and all below it are loaded, also where one below has no weights of its own."""
    told: list[str] = []
    model = of_told(told)
    load_weights(
        model, {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    )
    assert told == ["inner", "idle", "middle", "empty", "top"]


def test_weights_that_a_program_loads_by_itself() -> None:
    """The function for such programs calls the same modules, those inside first."""
    told: list[str] = []
    model = of_told(told)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(2)
    process_weights_after_loading(model)
    assert told == ["empty", "inner", "idle", "middle", "top"]


@pytest.mark.parametrize("load", ["load_weights", "process_weights_after_loading", "graft"])
def test_replacements_of_plugins_are_served(site, load: str) -> None:
    """What a plugin constructs in the place of a layer is called like any module, however its weights came."""
    site.plugin("acme", PLUGIN.format(body="assert self.weight.sum()") + RELEASED)
    weight, x = torch.rand(8) + 1, torch.randn(2, 8)
    model = nn.Sequential(nn.RMSNorm(8) if load == "graft" else RMSNorm(8))
    if load == "load_weights":
        load_weights(model, {"0.weight": weight})
    else:
        model.load_state_dict({"0.weight": weight})
        getattr(opgraft, load, process_weights_after_loading)(model)
    torch.testing.assert_close(model(x), 2 * weight * x)
    if load == "graft":
        op = model[0]
        opgraft.ungraft(model)
        assert not hasattr(op, "doubled")
        torch.testing.assert_close(model(x), nn.functional.rms_norm(x, (8,), weight))


@pytest.mark.parametrize("load", ["load_weights", "process_weights_after_loading", "graft"])
def test_a_hook_that_raises(site, load: str) -> None:
    """The error names the module's path, class, distribution and line; a graft leaves the model as it was."""
    site.plugin("acme", PLUGIN.format(body="1 / 0") + RELEASED, version="3.2")
    norm = nn.RMSNorm(8) if load == "graft" else RMSNorm(8)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Identity(), norm])})
    words = r"process_weights_after_loading of 'layers.1', a AcmeRMSNorm of acme 3.2, raised at .*acme.py:9: ZeroDiv"
    ways = {
        "load_weights": partial(load_weights, weights={"layers.1.weight": torch.ones(8)}),
        "process_weights_after_loading": process_weights_after_loading,
        "graft": opgraft.graft,
    }
    with pytest.raises(WeightError, match=words) as raised:
        ways[load](model)
    told = opgraft.explain_exception(raised.value)
    assert told is not None
    assert (told.op, str(told.provider)) == ("rms_norm", "acme 3.2")
    assert load != "graft" or type(model["layers"][1]) is nn.RMSNorm


def test_errors_that_say_enough_stay_what_they_are() -> None:
    """Memory that ran out is no fault of the hook: whoever looks for that finds it."""

    class Hungry(nn.Module):
        def process_weights_after_loading(self) -> None:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        process_weights_after_loading(nn.ModuleDict({"layer": Hungry()}))


def test_a_graft_leaves_alone_what_it_could_not_take_back(site) -> None:
    """A replacement that changes weights and cannot change them back takes no module's place."""
    site.plugin("acme", PLUGIN.format(body="pass"))
    model = nn.Sequential(nn.RMSNorm(8))
    report = opgraft.graft(model)
    assert type(model[0]) is nn.RMSNorm
    assert "AcmeRMSNorm defines process_weights_after_loading, and no release_weights" in " ".join(
        str(report).split()
    )
