"""The stages of a pipeline: which of a model's layers a rank has."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from opgraft.distributed import get_pp_group
from opgraft.errors import DistributedError, ModelError
from opgraft.models.files import open_weights
from torch import Tensor


@dataclass(frozen=True)
class Stage:
    """The part of a model that a rank of a pipeline has.

    Attributes:
        layers: the numbers of its layers.
        num_layers: of the whole model.
    """

    layers: range
    num_layers: int

    @property
    def is_first(self) -> bool:
        """True where token ids come in."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """True where logits come out."""
        return self.layers.stop == self.num_layers

    @classmethod
    def of(cls, model: Any, layers: str, num_layers: int, heads: Sequence[str]) -> Stage:
        """Return the stage of this rank: as ``parallel.stage_layers`` says, else about as many bytes on each.

        Counted is what a step reads: the weights of layers, and on the last stage those of the head.

        Args:
            model: that is constructed, a ``Model``.
            layers: path of the layers.
            num_layers: how many there are.
            heads: names of the weight of the head; the first that the checkpoint has counts.

        Raises:
            DistributedError: there are more stages than layers, or ``parallel.stage_layers`` are others.
        """
        group = get_pp_group()
        if group.world_size == 1:
            return cls(range(num_layers), num_layers)
        if group.world_size > num_layers:
            raise DistributedError(
                f"the pipeline has {group.world_size} stages, and {type(model).__name__} has {num_layers} layers, one "
                "for each at least: lower parallel.pipeline"
            )
        chosen = model.opgraft_config.resolved().parallel.stage_layers
        if chosen:
            _expect_whole(chosen, group.world_size, num_layers)
        ends = [
            0,
            *accumulate(
                chosen or evenly(_bytes(model, layers, num_layers, heads), group.world_size)
            ),
        ]
        return cls(range(*ends[group.rank_in_group :][:2]), num_layers)


def expect_given(stage: Stage, inputs_embeds: Tensor | None) -> Tensor:
    """Return what a later stage is given.

    Raises:
        ModelError: that is nothing.
    """
    if inputs_embeds is None:
        raise ModelError(
            f"this rank has the layers from {stage.layers.start} on, and was given token ids: give it what the stage "
            "before returns as inputs_embeds, or let the engine run the model"
        )
    return inputs_embeds


def _expect_whole(chosen: Sequence[int], stages: int, num_layers: int) -> None:
    if len(chosen) != stages or sum(chosen) != num_layers or min(chosen) < 1:
        raise DistributedError(
            f"parallel.stage_layers is {', '.join(map(str, chosen))}, and {num_layers} layers go to {stages} stages: "
            "give the number of layers of each stage, at least 1, or leave it out"
        )


def evenly(sizes: Sequence[int], stages: int) -> Sequence[int]:
    """Return how many layers of some sizes each stage takes so that the squares of their totals add up to the least."""
    ends = [0, *accumulate(sizes)]
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, stages + 1):
        best = {
            end: min(
                (cost + (ends[end] - ends[start]) ** 2, (*counts, end - start))
                for start, (cost, counts) in best.items()
                if start < end
            )
            for end in range(stage, len(sizes) - stages + stage + 1)
        }
    return best[len(sizes)][1]


def _bytes(model: Any, layers: str, num_layers: int, heads: Sequence[str]) -> list[int]:
    """Return the bytes of each layer in the checkpoint, the head's with the last; all alike where it does not tell."""
    sizes, outer = [0] * num_layers, dict.fromkeys(heads, 0)
    name, numbered = model.opgraft_config.model.name, re.compile(rf"{re.escape(layers)}\.(\d+)\.")
    for stored, tensor in open_weights(name).tensors.items() if name is not None else ():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        for mapped in model.weights_mapper.spellings(stored):
            found = numbered.match(mapped)
            if found and int(found[1]) < num_layers:
                sizes[int(found[1])] += size
            elif mapped in outer:
                outer[mapped] = size
    if not all(sizes):
        return [1] * num_layers
    sizes[-1] += next(filter(None, outer.values()), 0)
    return sizes
