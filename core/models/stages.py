"""The stages of a pipeline: the share of a model's layers on each rank."""

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
    """The part of a model on a rank of a pipeline.

    Attributes:
        layers: the numbers of the layers of this stage.
        num_layers: the number of layers of the whole model.
    """

    layers: range
    num_layers: int

    @property
    def is_first(self) -> bool:
        """True if the stage takes token ids."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """True if the stage computes logits."""
        return self.layers.stop == self.num_layers

    @classmethod
    def of(cls, model: Any, layers: str, num_layers: int, heads: Sequence[str]) -> Stage:
        """Return the stage of this rank.

        ``parallel.stage_layers`` decides. Without this setting, each stage reads about as many
        bytes in a step: the weights of layers, and on the last stage the weight of the head.

        Args:
            model: the ``Model`` that is constructed.
            layers: the path of the list of layers.
            num_layers: the number of layers.
            heads: names of the head's weight. The first name in the checkpoint counts.

        Raises:
            DistributedError: there are more stages than layers, or ``parallel.stage_layers`` does
                not fit the stages and layers.
        """
        group = get_pp_group()
        # Early, as a model of one stage need not open a checkpoint.
        if group.world_size == 1:
            return cls(range(num_layers), num_layers)
        if group.world_size > num_layers:
            raise DistributedError(
                f"the pipeline has {group.world_size} stages, and {type(model).__name__} has "
                f"{num_layers} layers, one for each at least: lower parallel.pipeline"
            )
        counts = model.opgraft_config.resolved().parallel.stage_layers
        if counts:
            _expect_whole(counts, group.world_size, num_layers)
        else:
            sizes = _bytes_of_layers(model, layers, num_layers, heads)
            counts = evenly(sizes, group.world_size)
        ends = [0, *accumulate(counts)]
        rank = group.rank_in_group
        return cls(range(ends[rank], ends[rank + 1]), num_layers)


def expect_given(stage: Stage, inputs_embeds: Tensor | None) -> Tensor:
    """Return the input of a later stage.

    Raises:
        ModelError: there is no input.
    """
    if inputs_embeds is None:
        raise ModelError(
            f"this rank has the layers from {stage.layers.start} on, and was given token ids: give "
            "it what the stage before returns as inputs_embeds, or let the engine run the model"
        )
    return inputs_embeds


def _expect_whole(chosen: Sequence[int], stages: int, num_layers: int) -> None:
    if len(chosen) != stages or sum(chosen) != num_layers or min(chosen) < 1:
        raise DistributedError(
            f"parallel.stage_layers is {', '.join(map(str, chosen))}, and {num_layers} layers go "
            f"to {stages} stages: give the number of layers of each stage, at least 1, or leave it "
            "out"
        )


def evenly(sizes: Sequence[int], stages: int) -> Sequence[int]:
    """Return the number of layers for each stage.

    The sum of the squares of the stages' bytes is the least possible.

    Args:
        sizes: the bytes of each layer.
        stages: the number of stages.
    """
    ends = [0, *accumulate(sizes)]
    # Number of layers → the least cost of the stages so far with these layers, and their counts.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, stages + 1):
        before = best
        best = {}
        # Each stage still to come needs a layer.
        for end in range(stage, len(sizes) - stages + stage + 1):
            choices = []
            for start, (cost, counts) in before.items():
                if start < end:
                    square = (ends[end] - ends[start]) ** 2
                    choices.append((cost + square, (*counts, end - start)))
            # Of equal costs, the smaller counts win: every rank must find the same stages.
            best[end] = min(choices)
    return best[len(sizes)][1]


def _bytes_of_layers(
    model: Any, layers: str, num_layers: int, heads: Sequence[str]
) -> Sequence[int]:
    """Return the bytes of each layer in the checkpoint. The last layer's include the head's.

    All numbers are equal if the checkpoint does not tell. The arguments are those of ``Stage.of``.
    """
    name = model.opgraft_config.model.name
    stored = {} if name is None else open_weights(name).tensors
    numbered = re.compile(rf"{re.escape(layers)}\.(\d+)\.")
    sizes = [0] * num_layers
    head_sizes = dict.fromkeys(heads, 0)
    for stored_name, tensor in stored.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        # Only one of the spellings is a name of the model.
        for mapped in model.weights_mapper.spellings(stored_name):
            found = numbered.match(mapped)
            number = int(found[1]) if found else num_layers
            if number < num_layers:
                sizes[number] += size
            elif mapped in head_sizes:
                head_sizes[mapped] = size
    # Without a checkpoint, or with layers of other names.
    if not all(sizes):
        return [1] * num_layers
    for size in head_sizes.values():
        if size:
            sizes[-1] += size
            break
    return sizes
