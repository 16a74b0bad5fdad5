"""``StateLayer``, the base of layers that keep a state of each sequence, and the weights of their convolutions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from opgraft.binding.custom_op import PluggableLayer
from opgraft.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from opgraft.errors import LayerError, WeightError
from opgraft.ops.attention.batch import LayerStates, current_batch
from opgraft.ops.linear.sharding import divide
from opgraft.ops.prefixes import claim_prefix
from opgraft.ops.weights import LoadedTensor, set_weight_attrs
from torch import Tensor, nn


class StateBatch(NamedTuple):
    """The sequences of a call, and where their states are.

    Attributes:
        query_start_loc: where the tokens of each begin and end, integers ``[sequences + 1]``.
        states: the layer's tensors, by slot.
        slots: of each sequence, int64 ``[sequences]``.
        steps: each has one token in this call.
    """

    query_start_loc: Tensor
    states: tuple[Tensor, ...]
    slots: Tensor
    steps: bool

    def initial(self, number: int) -> Tensor:
        """Return the states that the sequences begin with in one of the tensors."""
        return self.states[number][self.slots]

    def finish(self, *final: Tensor) -> None:
        """Keep the states that the sequences end with."""
        for tensor, state in zip(self.states, final, strict=True):
            tensor[self.slots] = state.to(tensor.dtype)


class StateLayer(PluggableLayer, ABC):
    """A layer that carries a state from token to token of a sequence.

    The sequences, and their states under the layer's ``prefix``, are those of the current ``AttentionBatch``. Where
    that has none, each sequence begins with zeros and nothing is kept; without a batch all tokens are one sequence.

    Args:
        prefix: the layer's path in its model, under which its states are found.
    """

    __op_base__ = True

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = self.layer_name = prefix
        claim_prefix(prefix, self)

    @abstractmethod
    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tensors of one sequence's state on this rank."""

    @abstractmethod
    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return their dtypes."""

    def state_batch(self, hidden_states: Tensor) -> StateBatch:
        """Return the sequences of a call with ``hidden_states``, ``[tokens, hidden_size]``.

        Raises:
            LayerError: the batch has another number of tokens, no states for the layer or some of another shape.
        """
        batch, tokens = current_batch(), len(hidden_states)
        if batch is None:
            bounds = torch.tensor([0, tokens], dtype=torch.int32, device=hidden_states.device)
            return self._without_states(bounds, hidden_states.device)
        if not batch.states:
            return self._without_states(batch.query_start_loc, hidden_states.device)
        found = batch.states.get(self.prefix)
        if found is None:
            known = ", ".join(map(repr, list(batch.states)[:3]))
            raise LayerError(
                f"layer {self.prefix!r} keeps a state, and the batch has some of {known}: give it the prefix of "
                "state_layers(model)"
            )
        self._expect_states(found)
        steps = batch.max_query_len == 1 and tokens == len(found.slots)
        return StateBatch(batch.query_start_loc, found.tensors, found.slots, steps)

    def _without_states(self, bounds: Tensor, device: torch.device) -> StateBatch:
        count = len(bounds) - 1
        shapes = zip(self.get_state_shape(), self.get_state_dtype(), strict=True)
        zeros = tuple(torch.zeros(count, *shape, dtype=dtype, device=device) for shape, dtype in shapes)
        return StateBatch(bounds, zeros, torch.arange(count, device=device), False)

    def _expect_states(self, found: LayerStates) -> None:
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in found.tensors)
        if shapes != self.get_state_shape():
            raise LayerError(
                f"layer {self.prefix!r}: its states have shapes {shapes}, expected {self.get_state_shape()}: make them "
                "by get_state_shape"
            )


def state_layers(model: nn.Module) -> dict[str, StateLayer]:
    """Return the layers of a model that keep a state, by the prefix under which each finds its own.

    Raises:
        LayerError: two have one prefix, and so would have one state.
    """
    layers: dict[str, StateLayer] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, StateLayer) and layers.setdefault(layer.prefix, layer) is not layer:
            raise LayerError(
                f"the layer {path!r} has the prefix {layer.prefix!r}, as another one of the model that keeps a state "
                "has: both would write to one. Give each layer its path as prefix"
            )
    return layers


class DepthwiseConv(nn.Module):
    """The weights of a causal depthwise convolution, of which a rank has a part of each of some runs of channels.

    Args:
        channels: of all ranks, one number for each run.
        width: tokens that a channel sees.
        bias: whether there is one.

    Raises:
        LayerError: the ranks do not divide a run.
    """

    bias: nn.Parameter | None

    def __init__(self, channels: Sequence[int], width: int, bias: bool) -> None:
        super().__init__()
        self.runs = tuple(channels)
        self.ranks, self.rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.channels = sum(divide(run, self.ranks, "the channels of a convolution") for run in self.runs)
        self.weight = nn.Parameter(torch.zeros(self.channels, 1, width), requires_grad=False)
        self.register_parameter("bias", nn.Parameter(torch.zeros(self.channels), requires_grad=False) if bias else None)
        for parameter in self.parameters():
            set_weight_attrs(parameter, {"weight_loader": self.weight_loader})

    @property
    def taps(self) -> Tensor:
        """The weight as ``[channels, width]``."""
        return self.weight.squeeze(1)

    def weight_loader(self, param: Tensor, loaded_weight: LoadedTensor) -> None:
        """Load this rank's channels of a weight ``[channels, 1, width]`` or a bias ``[channels]``.

        Raises:
            WeightError: it has another shape.
        """
        load_channels(param, loaded_weight, self.runs, self.ranks, self.rank)


def load_channels(param: Tensor, loaded: LoadedTensor, runs: Sequence[int], ranks: int, rank: int) -> None:
    """Load a rank's part of each of some runs of rows, which lie one after another in ``loaded``.

    Raises:
        WeightError: it has another shape.
    """
    expected = (sum(runs), *param.shape[1:])
    if tuple(loaded.shape) != expected:
        raise WeightError.of_shape("a weight by channel", loaded.shape, expected)
    start = offset = 0
    for run in runs:
        size = run // ranks
        part = loaded.narrow(0, start + rank * size, size)
        param.data.narrow(0, offset, size).copy_(part[...])
        start, offset = start + run, offset + size


def by_channel(channels: int, *others: int, load: Callable[[Tensor], Tensor] | None = None) -> nn.Parameter:
    """Make a parameter ``[channels, *others]`` in float32, of which a rank has a part of the channels.

    Args:
        channels: of all ranks, which divide them.
        others: further sizes.
        load: makes its values of those that are loaded, in float32.
    """
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    zeros = torch.zeros(channels // ranks, *others, dtype=torch.float32)
    parameter = nn.Parameter(zeros, requires_grad=False)

    def weight_loader(param: Tensor, loaded_weight: LoadedTensor) -> None:
        load_channels(param, loaded_weight, [channels], ranks, rank)
        if load is not None:
            param.data.copy_(load(param.data))

    set_weight_attrs(parameter, {"weight_loader": weight_loader})
    return parameter


def negated_exponential(values: Tensor) -> Tensor:
    """Return ``A`` of what checkpoints have as ``A_log``."""
    return -values.exp()


def ranks_of(sizes: Mapping[str, int]) -> int:
    """Return the number of tensor-parallel ranks, each of which divides all of some sizes.

    Raises:
        LayerError: it does not divide one.
    """
    ranks = get_tensor_model_parallel_world_size()
    for what, size in sizes.items():
        divide(size, ranks, what)
    return ranks
