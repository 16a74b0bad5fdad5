"""Stages of models of transformers: their layers are found by a call without memory, and those of others left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opgraft.models.stages import Stage, expect_given
from torch import Tensor, nn

_SHARED = ("attention_mask", "position_embeddings", "position_ids", "cache_position")
"""Arguments with tensors that are the same for all layers of a kind, whatever the tokens are."""


@dataclass(frozen=True)
class LayerChain:
    """The layers of a model, each of which is called with what the one before has returned.

    Attributes:
        path: of their list.
        results: how many things a layer returns, the hidden states first; 0 where it returns these alone.
        uncut: why there is no such list, empty if there is.
    """

    path: str = ""
    results: int = 0
    uncut: str = ""


@dataclass(frozen=True, eq=False)
class _Call:
    layer: nn.Module
    hidden_states: Any
    others: tuple[str, ...]
    result: Any


class LayerRecorder:
    """Notes the calls of layers in the lists of a model that have one for each that its config names.

    Args:
        model: without memory.
        mask: that it is called with, which is no tensor of one layer.
    """

    def __init__(self, model: Any, mask: Tensor | None) -> None:
        self.count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
        self.mask = mask
        self.lists = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == self.count
        }
        self.calls: list[_Call] = []
        for layers in self.lists.values():
            for layer in layers:
                layer.register_forward_hook(self._note, with_kwargs=True)

    def _note(
        self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], result: Any
    ) -> None:
        named = dict(named)
        hidden_states, *rest = given or [named.pop("hidden_states", None)]
        unnamed = [
            "a tensor without a name"
            for each in rest
            if isinstance(each, Tensor) and each is not self.mask
        ]
        others = [
            name for name, value in named.items() if name not in _SHARED and _has_tensor(value)
        ]
        self.calls.append(_Call(layer, hidden_states, (*unnamed, *others), result))

    def chain(self) -> LayerChain:
        """Return the layers, or why they are none that stages can share."""
        reason = f"it has no list of {self.count} layers, each called once with what the one before returned"
        for path, layers in self.lists.items():
            calls = [call for call in self.calls if any(call.layer is layer for layer in layers)]
            if [id(call.layer) for call in calls] != list(map(id, layers)):
                continue
            if any(call.others for call in calls):
                name = next(call.others[0] for call in calls if call.others)
                reason = f"its layers take {name}, which only the first stage would know"
                continue
            results = [
                call.result[0] if isinstance(call.result, tuple) else call.result for call in calls
            ]
            if all(
                call.hidden_states is before
                for call, before in zip(calls[1:], results, strict=False)
            ):
                return LayerChain(
                    path, len(calls[0].result) if isinstance(calls[0].result, tuple) else 0
                )
        return LayerChain(uncut=reason)


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple) and any(map(_has_tensor, value))
    )


class Gate:
    """The ends of a stage: what came from the stage before, and what goes to the next.

    Whatever the model does before its layers is done with zeros on later stages, and what it does behind them is done
    in vain on earlier ones.

    Args:
        stage: of this rank.
        embedding_dim: of the embedding.
    """

    def __init__(self, stage: Stage, embedding_dim: int) -> None:
        self.stage = stage
        self.embedding_dim = embedding_dim
        self.received: Tensor | None = None
        self.passed: Tensor | None = None

    def enter(self, inputs_embeds: Tensor | None) -> Tensor | None:
        """Return the embeddings that the model is called with; on a later stage keep what is given for its layers.

        Raises:
            ModelError: a later stage is given nothing.
        """
        if self.stage.is_first:
            return inputs_embeds
        self.received = given = expect_given(self.stage, inputs_embeds)
        return given.new_zeros(given.shape[1], self.embedding_dim)

    def leave(self, output: Tensor) -> Tensor:
        """Return what goes to the next stage, or the output of the model on the last one."""
        passed, self.received, self.passed = self.passed, None, None
        return output if self.stage.is_last or passed is None else passed


class _Elsewhere(nn.Module):
    """Stands for a layer that another stage has.

    Args:
        layer: whose attributes its model may look at.
        gate: of the stage.
        results: as of ``LayerChain``.
        place: "before" stands right before the stage, "behind" right behind it.
    """

    def __init__(self, layer: nn.Module, gate: Gate, results: int, place: str) -> None:
        super().__init__()
        self.__dict__.update(
            {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        )
        self.gate, self.results, self.place = gate, results, place

    def forward(self, *given: Any, **named: Any) -> Any:
        hidden_states = given[0] if given else named["hidden_states"]
        if self.place == "before":
            hidden_states = self.gate.received
        elif self.place == "behind":
            self.gate.passed = hidden_states
        return (hidden_states, *[None] * (self.results - 1)) if self.results else hidden_states


def leave_out(layers: nn.ModuleList, stage: Stage, results: int, embedding_dim: int) -> Gate:
    """Replace the layers that other stages have, and return the ends of this one; for arguments see ``Gate``."""
    gate = Gate(stage, embedding_dim)
    places = {stage.layers.start - 1: "before", stage.layers.stop: "behind"}
    for number, layer in enumerate(layers):
        if number not in stage.layers:
            layers[number] = _Elsewhere(layer, gate, results, places.get(number, ""))
    return gate
