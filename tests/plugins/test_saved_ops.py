"""Ops that are saved where a plugin is active and loaded where it is not."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft.binding.rebinding import rebind
from opgraft.binding.specialisation import enforced
from opgraft.ops import RMSNorm
from opgraft.ops.layernorm.modules import RMSNorm as Native
from torch import nn

pytestmark = pytest.mark.usefixtures("warm_children")

PLUGIN = """
import opgraft
from opgraft.ops import RMSNorm
platforms = "any"

@RMSNorm.register_oot(WHEN)
class Norm(RMSNorm):
    CONSTRUCTOR
    def forward_oot(self, x, residual=None):
        return x * 0 + 42

@opgraft.hookimpl
def opgraft_register_ops(platform): ...
"""
CONSTRUCTOR = "def __init__(self, *args, **kwargs):\n        super().__init__(*args, **kwargs)\n        self.own = 1\n"


def plugin(when: str = "", constructor: str = "") -> str:
    return PLUGIN.replace("WHEN", when).replace("CONSTRUCTOR", constructor)


def saved_with_the_plugin(enforce: bool = False) -> bytes:
    model = nn.Sequential(RMSNorm(4))
    if enforce:
        model[0]._adopt(enforced(model[0].binding))
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 42.0))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return buffer.getvalue()


def loaded(data: bytes) -> nn.Module:
    model: nn.Module = torch.load(io.BytesIO(data), weights_only=False)
    return model


@pytest.mark.parametrize("enforce", [False, True])
@pytest.mark.parametrize("constructor", ["", CONSTRUCTOR])
def test_a_disabled_plugins_kernel_does_not_run(
    site, monkeypatch, constructor: str, enforce: bool
) -> None:
    """A saved op falls back to the native definition where its plugin is on the deny list, and says so."""
    site.plugin("acme", plugin(constructor=constructor))
    data = saved_with_the_plugin(enforce)
    opgraft.reset()
    monkeypatch.setenv("OPGRAFT_PLUGINS_DISABLE", "acme")
    model = loaded(data)
    x = torch.randn(2, 4)
    assert torch.equal(model(x), Native(4)(x))
    text = str(model[0].decision)
    assert "saved as Norm, and plugin acme of acme 1.0 is rejected: on the deny list" in text
    assert model[0].op_class.__name__ == ("Norm" if constructor else "RMSNorm")
    if constructor:
        assert "__init__ keeps it from becoming a RMSNorm" in text
    again = pickle.loads(pickle.dumps(model))  # noqa: S301  # our own
    assert torch.equal(again(x), Native(4)(x))


def test_a_class_that_was_kept_gets_its_kernel_back(site, monkeypatch) -> None:
    """An op that kept its class while the plugin was disabled runs its kernel again where it is not."""
    site.plugin("acme", plugin(constructor=CONSTRUCTOR))
    data = saved_with_the_plugin()
    opgraft.reset()
    monkeypatch.setenv("OPGRAFT_PLUGINS_DISABLE", "acme")
    model = loaded(data)
    data = pickle.dumps(model)
    opgraft.reset()
    monkeypatch.delenv("OPGRAFT_PLUGINS_DISABLE")
    assert loaded_value(pickle.loads(data)) == 42  # noqa: S301  # our own
    rebind(model)
    assert loaded_value(model) == 42


def loaded_value(model: nn.Module) -> float:
    return float(model(torch.ones(1, 4)).detach()[0, 0])


def test_a_device_that_is_gone(site, monkeypatch, tmp_path: Path) -> None:
    """Where the platform of the plugin is not there any more its kernel does not run, and the reason says which."""
    there = tmp_path / "device"
    there.touch()
    probe = f"import os; return Evidence(os.path.exists({str(there)!r}), 'looked')"
    site.platform("acme", probe=probe, plugin=plugin())
    data = saved_with_the_plugin()
    opgraft.reset()
    there.unlink()
    model = loaded(data)
    assert loaded_value(model) == pytest.approx(1.0)
    assert "applies on acme only, this process runs on cpu" in json.dumps(
        model[0].decision.to_dict()
    )


def test_a_condition_that_no_longer_holds(site, monkeypatch) -> None:
    """A replacement whose when= is false here is not what a saved op runs, and one whose is true still is."""
    site.plugin("acme", "import os\n" + plugin("when=lambda platform: 'GONE' not in os.environ"))
    data = saved_with_the_plugin()
    assert loaded_value(loaded(data)) == 42
    opgraft.reset()
    monkeypatch.setenv("GONE", "1")
    model = loaded(data)
    assert loaded_value(model) == pytest.approx(1.0)
    assert "saved as Norm, and its when= condition is false here" in str(model[0].decision)


def test_what_is_chosen_now_may_be_another_plugin(site, monkeypatch) -> None:
    """Where another plugin replaces the op here, a saved op of the disabled one takes that."""
    site.plugin("acme", plugin())
    data = saved_with_the_plugin()
    opgraft.reset()
    site.plugin("zeta", plugin().replace("+ 42", "+ 7"))
    monkeypatch.setenv("OPGRAFT_PLUGINS_DISABLE", "acme")
    model = loaded(data)
    assert loaded_value(model) == 7
    assert "saved as Norm" in str(model[0].decision)
