"""``StateLayer``, the base of layers that keep a state of each sequence, and the weights of their convolutions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from opgraft.binding.custom_op import PluggableLayer
from opgraft.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from opgraft.errors import LayerError, WeightError
from opgraft.ops.attention.batch import LayerStates, current_batch
from opgraft.ops.checks import expect_positive, expect_size
from opgraft.ops.linear import MergedColumnParallelLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.linear.sharding import OutputShard, divide
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

    def state_batch(self, hidden_states: Tensor, output: Tensor | None = None) -> StateBatch:
        """Return the sequences of a call with ``hidden_states``, ``[tokens, hidden_size]``.

        Args:
            hidden_states: of the tokens of all sequences.
            output: where the result goes, for layers that write it to a tensor of that shape.

        Raises:
            ValueError: a shape does not fit.
            LayerError: the batch has no states for the layer, or some of another shape.
        """
        if hidden_states.dim() != 2:
            raise ValueError(
                f"{self.op_class.__qualname__}: hidden_states has shape {tuple(hidden_states.shape)}, expected "
                "[tokens, hidden_size]: put sequences one after another, and say where each begins by an AttentionBatch"
            )
        if output is not None and output.shape != hidden_states.shape:
            raise ValueError(
                f"{self.op_class.__qualname__}: output has shape {tuple(output.shape)}, expected that of "
                f"hidden_states, {tuple(hidden_states.shape)}"
            )
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
        zeros = tuple(
            torch.zeros(count, *shape, dtype=dtype, device=device) for shape, dtype in shapes
        )
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
        shards: this rank's part of each run, as ``rank_shards`` lists them.
        width: tokens that a channel sees.
        bias: whether there is one.
    """

    bias: nn.Parameter | None

    def __init__(self, shards: Sequence[OutputShard], width: int, bias: bool) -> None:
        super().__init__()
        self.shards = tuple(shards)
        self.channels = sum(shard.size for shard in shards)
        self.weight = nn.Parameter(torch.zeros(self.channels, 1, width), requires_grad=False)
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(self.channels), requires_grad=False) if bias else None
        )
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
        load_channels(param, loaded_weight, self.shards)


class GroupedColumnParallelLinear(MergedColumnParallelLinear):
    """Several column-parallel layers of one input, of which a rank has the parts that are given.

    Args:
        input_size: elements of the last dimension of the input.
        shards: this rank's rows of each layer, as ``rank_shards`` lists them; ranks may have the same ones.
        bias: whether there is one.
        quant_config: chooses the weight method.
        prefix: the layer's name in the checkpoint.
    """

    def __init__(
        self,
        input_size: int,
        shards: Sequence[OutputShard],
        bias: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        self._shards = list(shards)
        ranks = get_tensor_model_parallel_world_size()
        sizes = [shard.size * ranks for shard in shards]
        super().__init__(
            input_size, sizes, bias, quant_config=quant_config, prefix=prefix, return_bias=False
        )

    def output_shards(self) -> list[OutputShard]:
        """List this rank's rows of each layer."""
        return self._shards


def rank_shards(runs: Iterable[tuple[int, int]], what: str) -> list[OutputShard]:
    """List this rank's part of each of some runs of rows.

    Args:
        runs: of each, its rows and the units, such as heads or groups, that they are of. Where units are fewer than
            ranks, several ranks after one another have the same.
        what: has these units, for the error.

    Raises:
        LayerError: neither do the ranks divide the units, nor the units the ranks.
    """
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    shards: list[OutputShard] = []
    offset = 0
    for index, (rows, units) in enumerate(runs):
        replicas = max(1, ranks // units)
        if units * replicas % ranks:
            raise LayerError(
                f"{what}: {ranks} tensor-parallel ranks cannot share {units} parts: choose a number of ranks that "
                "divides them, or that they divide"
            )
        size = rows * replicas // ranks
        shards.append(OutputShard(index, offset, rank // replicas * size, size, rows))
        offset += size
    return shards


def load_channels(param: Tensor, loaded: LoadedTensor, shards: Sequence[OutputShard]) -> None:
    """Load a rank's part of each of some runs of rows, which lie one after another in ``loaded``.

    Raises:
        WeightError: it has another shape.
    """
    expected = (sum(shard.total for shard in shards), *param.shape[1:])
    if tuple(loaded.shape) != expected:
        raise WeightError.of_shape("a weight by channel", loaded.shape, expected)
    start = 0
    for shard in shards:
        part = loaded.narrow(0, start + shard.start, shard.size)
        param.data.narrow(0, shard.offset, shard.size).copy_(part[...])
        start += shard.total


def by_channel(
    channels: int, *others: int, load: Callable[[Tensor], Tensor] | None = None
) -> nn.Parameter:
    """Make a parameter ``[channels, *others]`` in float32, of which a rank has a part of the channels.

    Args:
        channels: of all ranks, which divide them.
        others: further sizes.
        load: makes its values of those that are loaded, in float32.
    """
    shards = rank_shards([(channels, channels)], "the channels of a mixer")
    parameter = nn.Parameter(
        torch.zeros(shards[0].size, *others, dtype=torch.float32), requires_grad=False
    )

    def weight_loader(param: Tensor, loaded_weight: LoadedTensor) -> None:
        load_channels(param, loaded_weight, shards)
        if load is not None:
            param.data.copy_(load(param.data))

    set_weight_attrs(parameter, {"weight_loader": weight_loader})
    return parameter


def negated_exponential(values: Tensor) -> Tensor:
    """Return ``A`` of what checkpoints have as ``A_log``."""
    return -values.exp()


def expect_sizes(op: str, **sizes: int) -> None:
    """Raise ``ValueError`` unless each is a positive integer."""
    for name, size in sizes.items():
        expect_size(op, name, size)
        expect_positive(op, name, size)


def ranks_of(sizes: Mapping[str, int]) -> int:
    """Return the number of tensor-parallel ranks, each of which divides all of some sizes.

    Raises:
        LayerError: it does not divide one.
    """
    ranks = get_tensor_model_parallel_world_size()
    for what, size in sizes.items():
        divide(size, ranks, what)
    return ranks
