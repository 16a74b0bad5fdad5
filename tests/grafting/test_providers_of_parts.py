"""Composites whose parts come from several providers: no kernel is passed over, and the report names what runs."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from opgraft import graft
from opgraft.ops import GELU, GatedMLP
from torch import nn

PLUGIN = """
import opgraft
from opgraft import functional, ops

platforms = "any"

ran = []

def native(*args):
    return functional.linear.native(*args)

def linear(x, weight, bias=None, activation="none", residual=None):
    ran.append("linear " + activation)
    return native(x, weight, bias, activation, residual)

class Linear(ops.Linear):
    functional_oot = {"linear": linear}
    def forward_oot(self, input, residual=None):
        ran.append("linear alone")
        return self.forward_native(input, residual)

class GELU(ops.GELU):
    def forward_oot(self, input):
        ran.append("gelu")
        return self.forward_native(input)

class SiLU(ops.SiLU):
    def forward_oot(self, input):
        ran.append("silu")
        return self.forward_native(input)

class SiluAndMul(ops.SiluAndMul):
    def forward_oot(self, x):
        ran.append("silu_and_mul")
        return self.forward_native(x)

@opgraft.hookimpl
def opgraft_register_ops():
    for cls in (CLASSES,):
        opgraft.CustomOp.register_oot(cls, name=cls.__mro__[1])
"""


class FeedForward(nn.Module):
    """ViT's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Gated(nn.Module):
    """Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


def install(site: Any, plugins: dict[str, str]) -> None:
    """One distribution per entry, which provides the classes that are named."""
    for name, classes in plugins.items():
        site.plugin(name, PLUGIN.replace("CLASSES", classes))


def graft_and_run(
    module: nn.Module, plugins: dict[str, str]
) -> tuple[nn.Module, dict[str, str], list[str]]:
    """The grafted model, the providers of its parts, and which kernels of the plugins a call runs."""
    model = nn.Sequential(module).eval()
    plain, x = copy.deepcopy(model), torch.randn(3, 8)
    (row,) = graft(model).replaced
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    ran = [entry for name in plugins for entry in importlib.import_module(name).ran]
    return model, {part.path: part.provider.name for part in row.parts}, ran


@pytest.mark.parametrize(
    ("plugins", "parts", "ran"),
    [
        ({"one": "Linear"}, {"fc1": "one", "fc2": "one"}, ["linear gelu", "linear alone"]),
        ({"one": "Linear, GELU"}, {"fc1": "one", "fc2": "one"}, ["linear gelu", "linear alone"]),
        (
            {"one": "Linear", "two": "GELU"},
            {"fc1": "one", "act": "two", "fc2": "one"},
            ["linear alone", "linear alone", "gelu"],
        ),
        ({"two": "GELU"}, {"fc1": "opgraft", "act": "two", "fc2": "opgraft"}, ["gelu"]),
    ],
    ids=["linear", "both", "one each", "gelu"],
)
def test_an_activation_is_fused_where_its_kernel_is_not_passed_over(
    site: Any, plugins: dict[str, str], parts: dict[str, str], ran: list[str]
) -> None:
    """A linear kernel computes an activation that opgraft or its own distribution serves, and no other's."""
    install(site, plugins)
    assert graft_and_run(FeedForward(), plugins)[1:] == (parts, ran)


DOWN = {"down_proj": "opgraft"}
JOINT = DOWN | {"gate_proj and up_proj": "opgraft"}
LINEAR = DOWN | dict.fromkeys(("gate_proj", "up_proj"), "opgraft")


@pytest.mark.parametrize(
    ("plugins", "parts", "ran"),
    [
        ({}, JOINT | {"act_and_mul": "opgraft"}, []),
        ({"one": "SiLU"}, LINEAR | {"act_fn": "one"}, ["silu"]),
        ({"one": "SiluAndMul"}, JOINT | {"act_and_mul": "one"}, ["silu_and_mul"]),
        ({"one": "SiLU, SiluAndMul"}, JOINT | {"act_and_mul": "one"}, ["silu_and_mul"]),
        ({"one": "SiLU", "two": "SiluAndMul"}, LINEAR | {"act_fn": "one"}, ["silu"]),
    ],
    ids=["none", "silu", "gated", "both", "one each"],
)
def test_a_gated_layer_runs_the_kernel_it_reports(
    site: Any, plugins: dict[str, str], parts: dict[str, str], ran: list[str]
) -> None:
    """The gated activation stands for an activation that opgraft or its own distribution serves, and no other's."""
    install(site, plugins)
    assert graft_and_run(Gated(), plugins)[1:] == (parts, ran)


def test_a_hook_on_the_activation_fires() -> None:
    """With a hook on the activation, what it returns is computed with; an exchanged activation is too."""
    model = nn.Sequential(Gated()).eval()
    graft(model)
    layer, x = model[0], torch.randn(3, 8)
    assert isinstance(layer, GatedMLP)
    with torch.no_grad():
        expected = model(x)
        handle = layer.act_fn.register_forward_hook(lambda _, args, out: 0 * out)
        torch.testing.assert_close(model(x), layer.down_proj.bias.expand(3, 8))
        handle.remove()
        torch.testing.assert_close(model(x), expected)
        layer.act_fn = nn.ReLU()
        hidden = layer.gate_proj(x).relu() * layer.up_proj(x)
        torch.testing.assert_close(model(x), layer.down_proj(hidden))


def test_training_calls_the_activation(site: Any) -> None:
    """Where a gradient is required the activation's own kernel runs, whoever serves the gated one."""
    install(site, {"one": "SiLU, SiluAndMul"})
    model = nn.Sequential(Gated())
    graft(model)
    model(torch.randn(3, 8)).sum().backward()
    assert importlib.import_module("one").ran == ["silu"]


def test_another_activation_is_decided_on_anew(site: Any) -> None:
    """A class of the application that derives from the activation has a kernel of its own, which is not passed over."""

    class Double(GELU):
        def forward_native(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward_native(input)

    install(site, {"one": "Linear"})
    model, _, ran = graft_and_run(FeedForward(), {"one": "Linear"})
    assert ran == ["linear gelu", "linear alone"]
    layer: Any = model[0]
    layer.act, x = Double(), torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x), layer.fc2(2 * torch.nn.functional.gelu(layer.fc1(x))))
