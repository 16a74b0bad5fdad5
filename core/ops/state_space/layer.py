"""``StateLayer``, the base of layers with a state for each sequence, and their sharded weights."""

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
    """The sequences of a call, and the places of their states.

    Attributes:
        query_start_loc: the bounds of the tokens of sequences, integers ``[sequences + 1]``.
        states: the layer's tensors, by slot.
        slots: the slot of each sequence, int64 ``[sequences]``.
        steps: True if each sequence has one token in this call.
    """

    query_start_loc: Tensor
    states: tuple[Tensor, ...]
    slots: Tensor
    steps: bool

    def initial(self, number: int) -> Tensor:
        """Return the first states of the sequences, from one of the tensors."""
        return self.states[number][self.slots]

    def finish(self, *final: Tensor) -> None:
        """Store the last states of the sequences, one tensor for each of ``states``."""
        for tensor, state in zip(self.states, final, strict=True):
            tensor[self.slots] = state.to(tensor.dtype)


class StateLayer(PluggableLayer, ABC):
    """A layer that carries a state from token to token of a sequence.

    The current ``AttentionBatch`` has the sequences, and their states by the layer's ``prefix``. If
    the batch has no states, each sequence begins with zeros, and the last states are dropped.
    Without a batch all tokens are one sequence.

    Args:
        prefix: the layer's path in the model. The states are found by this path.
    """

    __op_base__ = True

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        # vLLM's name of the attribute is ``layer_name``.
        self.prefix = self.layer_name = prefix
        claim_prefix(prefix, self)

    @abstractmethod
    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tensors of one sequence's state on this rank."""

    @abstractmethod
    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of these tensors."""

    def state_batch(self, hidden_states: Tensor, output: Tensor | None = None) -> StateBatch:
        """Return the sequences of a call with ``hidden_states``, ``[tokens, hidden_size]``.

        Args:
            hidden_states: the tokens of all sequences, one sequence after another.
            output: the tensor for the result, like ``hidden_states``, if the layer writes to one.

        Raises:
            ValueError: a shape does not fit.
            LayerError: the batch has no states for the layer, or states of another shape.
        """
        shape = hidden_states.shape
        if len(shape) != 2 or (output is not None and output.shape != shape):
            raise self._misfit(hidden_states, output)

        batch = current_batch()
        tokens = len(hidden_states)
        if batch is None:
            bounds = torch.tensor([0, tokens], dtype=torch.int32, device=hidden_states.device)
            return self._without_states(bounds, hidden_states.device)
        if not batch.states:
            return self._without_states(batch.query_start_loc, hidden_states.device)

        found = batch.states.get(self.prefix)
        if found is None:
            known = ", ".join(map(repr, list(batch.states)[:3]))
            raise LayerError(
                f"layer {self.prefix!r} keeps a state, and the batch has some of {known}: "
                "give it the prefix of state_layers(model)"
            )

        self._expect_states(found)
        # At most one token each, and as many tokens as sequences: exactly one each.
        steps = batch.max_query_len == 1 and tokens == len(found.slots)
        return StateBatch(batch.query_start_loc, found.tensors, found.slots, steps)

    def _misfit(self, hidden_states: Tensor, output: Tensor | None) -> ValueError:
        """Return the error for tensors of wrong shapes."""
        name = self.op_class.__qualname__
        shape = tuple(hidden_states.shape)
        if output is None or len(shape) != 2:
            return ValueError(
                f"{name}: hidden_states has shape {shape}, expected [tokens, hidden_size]: "
                "put sequences one after another, and say where each begins by an AttentionBatch"
            )

        return ValueError(
            f"{name}: output has shape {tuple(output.shape)}, expected that of hidden_states, "
            f"{shape}"
        )

    def _without_states(self, bounds: Tensor, device: torch.device) -> StateBatch:
        """Return a batch with states of zeros, which nobody keeps."""
        count = len(bounds) - 1
        zeros = []
        for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype(), strict=True):
            zeros.append(torch.zeros(count, *shape, dtype=dtype, device=device))
        slots = torch.arange(count, device=device)
        return StateBatch(bounds, tuple(zeros), slots, steps=False)

    def _expect_states(self, found: LayerStates) -> None:
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in found.tensors)
        expected = self.get_state_shape()
        if shapes != expected:
            raise LayerError(
                f"layer {self.prefix!r}: its states have shapes {shapes}, expected {expected}: "
                "make them by get_state_shape"
            )


def state_layers(model: nn.Module) -> dict[str, StateLayer]:
    """Return the layers of a model with a state, by their prefixes.

    Raises:
        LayerError: two layers have one prefix, so they would share one state.
    """
    layers: dict[str, StateLayer] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, StateLayer):
            continue
        if layers.setdefault(layer.prefix, layer) is not layer:
            raise LayerError(
                f"the layer {path!r} has the prefix {layer.prefix!r}, as another one of the model "
                "that keeps a state has: both would write to one. "
                "Give each layer its path as prefix"
            )
    return layers


class DepthwiseConv(nn.Module):
    """The weights of a causal depthwise convolution on one rank.

    The channels consist of runs, such as those of the heads and of the groups. A rank has a part of
    each run.

    Args:
        shards: this rank's part of each run, from ``rank_shards``.
        width: taps, the number of tokens that an output depends on.
        bias: True adds a bias.
    """

    bias: nn.Parameter | None

    def __init__(self, shards: Sequence[OutputShard], width: int, bias: bool) -> None:
        super().__init__()
        self.shards = tuple(shards)
        self.channels = sum(shard.size for shard in shards)

        self.weight = nn.Parameter(torch.zeros(self.channels, 1, width), requires_grad=False)
        zeros = nn.Parameter(torch.zeros(self.channels), requires_grad=False)
        self.register_parameter("bias", zeros if bias else None)

        for parameter in self.parameters():
            set_weight_attrs(parameter, {"weight_loader": self.weight_loader})

    @property
    def taps(self) -> Tensor:
        """The weight as ``[channels, width]``."""
        return self.weight.squeeze(1)

    def weight_loader(self, param: Tensor, loaded_weight: LoadedTensor) -> None:
        """Load this rank's channels of a weight ``[channels, 1, width]`` or a bias ``[channels]``.

        Raises:
            WeightError: the loaded tensor has another shape.
        """
        load_channels(param, loaded_weight, self.shards)


class GroupedColumnParallelLinear(MergedColumnParallelLinear):
    """Several column-parallel layers of one input, with given parts on this rank.

    Args:
        input_size: elements of the last dimension of the input.
        shards: this rank's rows of each layer, from ``rank_shards``. Ranks may share rows.
        bias: True adds a bias.
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
        # The base divides sizes by the ranks. output_shards gives the true rows of shared parts.
        sizes = [shard.size * ranks for shard in shards]
        super().__init__(
            input_size, sizes, bias, quant_config=quant_config, prefix=prefix, return_bias=False
        )

    def output_shards(self) -> list[OutputShard]:
        """List this rank's rows of each layer."""
        return self._shards


def rank_shards(runs: Iterable[tuple[int, int]], what: str) -> list[OutputShard]:
    """List this rank's part of each run of rows.

    Example: ``[(64, 8), (16, 2)]`` on four ranks gives each rank 16 rows of the first run, and 8
    rows of the second, as ranks 0 and 1 share a unit.

    Args:
        runs: the rows of each run and their units, such as heads or groups. If a run has fewer
            units than ranks, neighbouring ranks share a unit.
        what: the name of the units, for the error.

    Raises:
        LayerError: the ranks do not divide the units, and the units do not divide the ranks.
    """
    ranks = get_tensor_model_parallel_world_size()
    rank = get_tensor_model_parallel_rank()
    shards: list[OutputShard] = []
    offset = 0
    for index, (rows, units) in enumerate(runs):
        replicas = max(1, ranks // units)
        if units * replicas % ranks:
            raise LayerError(
                f"{what}: {ranks} tensor-parallel ranks cannot share {units} parts: "
                "choose a number of ranks that divides them, or that they divide"
            )
        size = rows * replicas // ranks
        start = rank // replicas * size
        shards.append(OutputShard(index, offset, start, size, rows))
        offset += size
    return shards


def load_channels(param: Tensor, loaded: LoadedTensor, shards: Sequence[OutputShard]) -> None:
    """Load this rank's part of each run of rows; ``loaded`` has the runs one after another.

    Raises:
        WeightError: ``loaded`` has another shape.
    """
    expected = (sum(shard.total for shard in shards), *param.shape[1:])
    if tuple(loaded.shape) != expected:
        raise WeightError.of_shape("a weight by channel", loaded.shape, expected)

    start = 0
    for shard in shards:
        # Only this rank's rows are read from the file.
        part = loaded.narrow(0, start + shard.start, shard.size)
        param.data.narrow(0, shard.offset, shard.size).copy_(part[...])
        start += shard.total


def by_channel(
    channels: int, *others: int, load: Callable[[Tensor], Tensor] | None = None
) -> nn.Parameter:
    """Make a parameter ``[channels / ranks, *others]`` in float32, with this rank's channels.

    Args:
        channels: the channels of all ranks, a multiple of the ranks.
        others: further sizes.
        load: computes the parameter from the loaded values, both in float32.
    """
    shards = rank_shards([(channels, channels)], "the channels of a mixer")
    zeros = torch.zeros(shards[0].size, *others, dtype=torch.float32)
    parameter = nn.Parameter(zeros, requires_grad=False)

    def weight_loader(param: Tensor, loaded_weight: LoadedTensor) -> None:
        # Loaded first, because ``load`` computes in the parameter's float32.
        load_channels(param, loaded_weight, shards)
        if load is not None:
            param.data.copy_(load(param.data))

    set_weight_attrs(parameter, {"weight_loader": weight_loader})
    return parameter


def negated_exponential(values: Tensor) -> Tensor:
    """Return ``A`` from the ``A_log`` of a checkpoint."""
    return -values.exp()


def expect_sizes(op: str, **sizes: int) -> None:
    """Raise ``ValueError`` unless each size is a positive integer."""
    for name, size in sizes.items():
        expect_size(op, name, size)
        expect_positive(op, name, size)


def ranks_of(sizes: Mapping[str, int]) -> int:
    """Return the number of tensor-parallel ranks, a divisor of every size.

    Raises:
        LayerError: the number does not divide a size.
    """
    ranks = get_tensor_model_parallel_world_size()
    for what, size in sizes.items():
        divide(size, ranks, what)
    return ranks
