"""The layers of a foreign model that stages share, and why others are not cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opgraft.models.stages import Stage
from opgraft.models.transformers_stages import LayerRecorder, leave_out
from torch import nn

MASK = torch.ones(1, 1, 2, 2)


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.kind = number % 2
        self.weight = nn.Parameter(torch.full((3,), float(number + 2)))

    def forward(self, hidden_states: Any, mask: Any = None, more: Any = None, **_: Any) -> Any:
        return hidden_states * self.weight, None


class Stack(nn.Module):
    """Four layers, called in a way that a test chooses."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=4))
        self.layers = nn.ModuleList(map(Layer, range(4)))
        self.call = call

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden_states = self.call(layer, hidden_states)
        return hidden_states


def in_turn(layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer(
        hidden_states, MASK, attention_mask=MASK, position_embeddings=(MASK, MASK)
    )[0]
    return result


CALLS: dict[str, tuple[Any, str]] = {
    "by name": (lambda layer, x: layer(hidden_states=x)[0], ""),
    "in turn": (in_turn, ""),
    "changed between": (
        lambda layer, x: layer(x)[0] + 1,
        "called once with what the one before returned",
    ),
    "called twice": (
        lambda layer, x: layer(layer(x)[0])[0],
        "called once with what the one before returned",
    ),
    "an input of its own": (
        lambda layer, x: layer(x, per_layer=[x])[0],
        "its layers take per_layer",
    ),
    "another without a name": (
        lambda layer, x: layer(x, MASK, x)[0],
        "its layers take a tensor without a name",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_layers_that_follow_each_other(name: str) -> None:
    """Layers are shared where each is called once, with what the one before returned and nothing of the tokens."""
    call, reason = CALLS[name]
    model = Stack(call)
    recorder = LayerRecorder(model, MASK)
    model(torch.ones(1, 2, 3))
    chain = recorder.chain()
    assert reason in chain.uncut
    assert bool(chain.uncut) == bool(reason)
    if not reason:
        assert (chain.path, chain.results) == ("layers", 2)


def test_stages_one_after_another() -> None:
    """What two stages compute is what the whole model does; what stands for others' layers has their attributes."""
    whole, x = Stack(in_turn), torch.ones(1, 2, 3)
    first, last = Stack(in_turn), Stack(in_turn)
    gates = [
        leave_out(model.layers, Stage(layers, 4), 2, 3)
        for model, layers in ((first, range(3)), (last, range(3, 4)))
    ]
    assert [layer.kind for layer in last.layers] == [0, 1, 0, 1]
    passed = gates[0].leave(first(x))
    entered = gates[1].enter(passed)
    assert entered is not None
    torch.testing.assert_close(gates[1].leave(last(entered[None])), whole(x))
    assert sum(parameter.numel() for parameter in last.parameters()) == 3
