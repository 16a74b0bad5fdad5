"""Cut models of transformers into stages.

A call without memory finds the layers. Layers of other stages are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from opgraft.models.stages import Stage, expect_given
from torch import Tensor, nn

_SHARED = ("attention_mask", "position_embeddings", "position_ids", "cache_position")
"""Arguments with tensors that are the same for all layers of a kind."""


@dataclass(frozen=True)
class LayerChain:
    """The layers of a model, if each is called with the hidden states of the layer before.

    Attributes:
        path: the path of the list of layers.
        results: the length of the tuple that a layer returns, with the hidden states first; 0 if a
            layer returns the hidden states alone.
        uncut: the reason why there is no such list; empty if there is one.
    """

    path: str = ""
    results: int = 0
    uncut: str = ""


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a layer.

    ``others`` are the names of further tensors that belong to this layer's tokens.
    """

    layer: nn.Module
    hidden_states: Any
    others: tuple[str, ...]
    result: Any

    @property
    def states_after(self) -> Any:
        """The hidden states that the layer returns."""
        return self.result[0] if isinstance(self.result, tuple) else self.result


class LayerRecorder:
    """Notes the calls of layers in each list with as many modules as the config has layers.

    Args:
        model: a model without memory.
        mask: the mask that the model is called with. All layers share the mask.
    """

    def __init__(self, model: Any, mask: Tensor | None) -> None:
        self.count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
        self.mask = mask
        self.lists: dict[str, nn.ModuleList] = {}
        for path, module in model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.count:
                self.lists[path] = module
        self.calls: list[_Call] = []
        for layers in self.lists.values():
            for layer in layers:
                layer.register_forward_hook(self._note, with_kwargs=True)

    def _note(
        self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], result: Any
    ) -> None:
        # The hook must not change the caller's arguments.
        named = dict(named)
        hidden_states, *rest = given or [named.pop("hidden_states", None)]
        others = []
        for each in rest:
            if isinstance(each, Tensor) and each is not self.mask:
                others.append("a tensor without a name")
        for name, value in named.items():
            if name not in _SHARED and _has_tensor(value):
                others.append(name)
        self.calls.append(_Call(layer, hidden_states, tuple(others), result))

    def chain(self) -> LayerChain:
        """Return the layers, or the reason why stages cannot share them."""
        reason = (
            f"it has no list of {self.count} layers, each called once with what the one before "
            "returned"
        )
        for path, layers in self.lists.items():
            own = set(map(id, layers))
            calls = [call for call in self.calls if id(call.layer) in own]
            if [id(call.layer) for call in calls] != list(map(id, layers)):
                continue
            others = [name for call in calls for name in call.others]
            if others:
                reason = f"its layers take {others[0]}, which only the first stage would know"
                continue
            if not _follow_each_other(calls):
                continue
            first = calls[0].result
            return LayerChain(path, len(first) if isinstance(first, tuple) else 0)
        return LayerChain(uncut=reason)


def _follow_each_other(calls: Sequence[_Call]) -> bool:
    """Return True if each layer gets the very tensor that the layer before has returned."""
    # Not "==", which compares the elements of tensors.
    return all(after.hidden_states is before.states_after for before, after in pairwise(calls))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)


class StageEnds:
    """The two ends of a stage: the input from the stage before, and the output for the next stage.

    A later stage calls the code before the layers with zeros. An earlier stage calls the code
    after the layers in vain.

    Args:
        stage: the stage of this rank.
        embedding_dim: elements of an embedding.
    """

    def __init__(self, stage: Stage, embedding_dim: int) -> None:
        self.stage = stage
        self.embedding_dim = embedding_dim
        self.received: Tensor | None = None
        self.passed: Tensor | None = None

    def enter(self, inputs_embeds: Tensor | None) -> Tensor | None:
        """Return the embeddings to call the model with. A later stage keeps its own input here.

        Raises:
            ModelError: a later stage has no input.
        """
        if self.stage.is_first:
            return inputs_embeds
        received = expect_given(self.stage, inputs_embeds)
        self.received = received
        return received.new_zeros(received.shape[1], self.embedding_dim)

    def leave(self, output: Tensor) -> Tensor:
        """Return the input of the next stage; on the last stage, the output of the model."""
        passed = self.passed
        # The tensors would stay in memory until the next step.
        self.received = None
        self.passed = None
        return output if self.stage.is_last or passed is None else passed


class _Elsewhere(nn.Module):
    """Stands in the place of a layer on another stage.

    Args:
        layer: the layer. The model may read its attributes.
        gate: the ends of this stage.
        results: see ``LayerChain``.
        place: "before" is right before the stage, "behind" right behind the stage.
    """

    def __init__(self, layer: nn.Module, gate: StageEnds, results: int, place: str) -> None:
        super().__init__()
        # Parameters and children, which take memory, are in attributes with an underscore.
        for name, value in vars(layer).items():
            if not name.startswith("_"):
                self.__dict__[name] = value
        self.gate = gate
        self.results = results
        self.place = place

    def forward(self, *given: Any, **named: Any) -> Any:
        hidden_states = given[0] if given else named["hidden_states"]
        if self.place == "before":
            hidden_states = self.gate.received
        elif self.place == "behind":
            self.gate.passed = hidden_states
        if not self.results:
            return hidden_states
        # The model unpacks as many results as its layers return.
        return (hidden_states, *[None] * (self.results - 1))


def leave_out(layers: nn.ModuleList, stage: Stage, results: int, embedding_dim: int) -> StageEnds:
    """Replace the layers of other stages, and return the ends of this stage.

    Args:
        layers: all layers of the model.
        stage: the stage of this rank.
        results: see ``LayerChain``.
        embedding_dim: elements of an embedding.
    """
    gate = StageEnds(stage, embedding_dim)
    places = {stage.layers.start - 1: "before", stage.layers.stop: "behind"}
    for number, layer in enumerate(layers):
        if number not in stage.layers:
            layers[number] = _Elsewhere(layer, gate, results, places.get(number, ""))
    return gate
