"""``Shard``, the part of a model on one rank of a split, with the rank's part of a step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from opgraft.config import CompilationConfig, OpgraftConfig, set_config
from opgraft.distributed import get_pp_group
from opgraft.distributed.layout import ParallelLayout
from opgraft.engine.planning.alike import computed_once
from opgraft.engine.planning.imagined import ExpectedExchange, Transfer, imagined_rank, noted_by
from opgraft.engine.runner.cache_layout import CacheLayout, cache_dtype
from opgraft.engine.workers.stage_link import StageLink
from opgraft.models.build import describe_model
from opgraft.models.model import HasLogits
from opgraft.ops.attention.cached import cache_shape
from opgraft.ops.attention.decoder import attention_layers
from opgraft.ops.embedding.vocab import VocabParallelEmbedding
from opgraft.ops.linear import LinearBase
from opgraft.ops.moe.fused import FusedMoE
from opgraft.ops.state_space.layer import state_layers
from torch import nn

_NATIVE = OpgraftConfig(compilation_config=CompilationConfig(custom_ops=("none",)))
"""Kernels cannot compute with tensors without memory, so that definitions run."""


class _ImaginedLink(StageLink):
    """Passes tensors without memory on."""

    def _expect_computed(self) -> None:
        """Skip the check of the stage before, which needs numbers."""


class Work(NamedTuple):
    """The bytes and operations of a step.

    Attributes:
        nbytes: bytes that are read from the memory of the device, or written there.
        flops: operations. A multiplication and an addition are two.
    """

    nbytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: object) -> Work:
        if not isinstance(other, Work):
            return NotImplemented
        return Work(self.nbytes + other.nbytes, self.flops + other.flops)


@dataclass(frozen=True)
class ShardStep:
    """A rank's part of a step with one new token for each sequence.

    Attributes:
        weights: the work on weights.
        cache: the work on keys, values and states.
        transfers: collectives in the order of the step.
    """

    weights: Work
    cache: Work
    transfers: tuple[Transfer, ...]


class Shard:
    """The part of a model on one rank, constructed as for loading, with tensors without memory.

    Args:
        config: resolved. The section ``parallel`` describes the split.
        layout: the layout of all ranks.
        rank: the number of the rank in the job.

    Attributes:
        weight_bytes: bytes of parameters and buffers after loading.
        dtype: the dtype of activations.
        cache: the layout of the rank's cache.
        experts: experts of all ranks in the layer with the most experts.

    Raises:
        OpgraftError: the model cannot be split in this way.
    """

    def __init__(self, config: OpgraftConfig, layout: ParallelLayout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        with imagined_rank(layout, rank), set_config(_NATIVE):
            self._model: Any = describe_model(config)
            self._imagine_exchange()
        self.dtype: torch.dtype = self._model.dtype
        self.weight_bytes = 0
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self.weight_bytes += tensor.nbytes
        dtype = cache_dtype(config.cache.dtype, self.dtype)
        layers = attention_layers(self._model)
        states = state_layers(self._model)
        block_size = config.cache.block_size
        self.cache = CacheLayout.of(layers, block_size, dtype, states)
        # Layers may have different numbers of experts.
        self.experts = 0
        for layer in self._layers_of_experts():
            self.experts = max(self.experts, layer.num_experts)

    def layer_bytes(self) -> list[int]:
        """Return the bytes of each layer of the stack, on a rank with all layers.

        The last layer's bytes include those of the head.
        """
        sizes: dict[int, int] = {}
        for name, parameter in self._model.named_parameters():
            found = re.search(r"\blayers\.(\d+)\.", name)
            if found:
                number = int(found[1])
                sizes[number] = sizes.get(number, 0) + parameter.nbytes
        head = getattr(self._model, "lm_head", None)
        # The last stage has both.
        if sizes and head is not None:
            last = max(sizes)
            sizes[last] += sum(parameter.nbytes for parameter in head.parameters())
        return [sizes[number] for number in sorted(sizes)]

    @property
    def layers(self) -> int:
        """The number of layers that mix tokens."""
        return len(self.cache.layers) + len(self.cache.states)

    def step(self, rows: int, context: int) -> ShardStep:
        """Return this rank's part of a step.

        Args:
            rows: the number of sequences. Each gets a token.
            context: tokens of each sequence.
        """
        on_weights = _work_on_weights(self._model, rows, self._layout.data)
        on_cache = _work_on_cache(self.cache, rows, context)
        # A state is read and written.
        on_states = Work(2.0 * rows * self.cache.bytes_per_state)
        # A rank alone sends nothing, so no step is run.
        transfers = self._transfers(rows) if self._layout.world > 1 else ()
        weights = sum(on_weights, Work())
        cache = sum(on_cache, on_states)
        return ShardStep(weights, cache, transfers)

    @torch.inference_mode()
    def _transfers(self, rows: int) -> tuple[Transfer, ...]:
        """Run a step without memory, and return the collectives."""
        meta = torch.device("meta")
        with imagined_rank(self._layout, self._rank) as parallelism, set_config(_NATIVE), meta:
            link = _ImaginedLink.of(self._model, meta)
            given = None
            if link is not None:
                link.begin(rows)
                given = link.receive()
            ids = torch.zeros(rows, dtype=torch.int64)
            with computed_once(self._model, parallelism):
                hidden = self._model(ids, torch.arange(rows), given)
            if link is not None:
                link.pass_on(hidden)
            if get_pp_group().is_last_rank and isinstance(self._model, HasLogits):
                self._model.compute_logits(hidden)
            return tuple(chain.from_iterable(noted_by(parallelism)))

    def _layers_of_experts(self) -> Iterator[FusedMoE]:
        return (module for module in self._model.modules() if isinstance(module, FusedMoE))

    def _imagine_exchange(self) -> None:
        """Make experts of several replicas exchange the expected numbers of rows."""
        for layer in self._layers_of_experts():
            if layer.exchange is not None and layer.placement is not None:
                expected: Any = ExpectedExchange(layer.num_experts, layer.placement.per_rank)
                layer.exchange = expected


def _work_on_weights(model: nn.Module, rows: int, replicas: int) -> Iterator[Work]:
    """Yield the work of each module on its weights."""
    head = getattr(model, "lm_head", None)
    for module in model.modules():
        # The parameters of children are yielded with the children.
        own = list(module.parameters(recurse=False))
        nbytes = sum(parameter.nbytes for parameter in own)
        if isinstance(module, FusedMoE):
            yield _work_of_experts(module, nbytes, rows, replicas)
        elif isinstance(module, VocabParallelEmbedding) and module is not head:
            # A row of the embedding for each token.
            yield Work(rows * nbytes / len(own[0]))
        elif isinstance(module, LinearBase):
            # Subclasses have the sizes. A quantized weight tells them no more.
            linear: Any = module
            elements = linear.input_size_per_partition * linear.output_size_per_partition
            yield Work(nbytes, 2.0 * rows * elements)
        elif own:
            # Vectors, such as weights of norms, take next to no time.
            elements = sum(parameter.numel() for parameter in own if parameter.dim() > 1)
            yield Work(nbytes, 2.0 * rows * elements)


def _work_of_experts(layer: FusedMoE, nbytes: int, rows: int, replicas: int) -> Work:
    """Return the expected work of experts if all are chosen equally often."""
    moe = layer.moe_config
    tokens = rows if layer.exchange is None else rows * replicas
    # An expert that no token visits is not read.
    share_of_token = layer.top_k / layer.num_experts
    visited_share = 1.0 - (1.0 - share_of_token) ** tokens
    # Copies of busy experts share the visits.
    places = layer.num_experts
    if layer.placement is not None:
        places += layer.placement.redundant
    visits = tokens * layer.top_k * len(layer.local_experts) / places
    # Three matrices: gate, up and down.
    flops_of_visit = 6.0 * moe.hidden_dim * moe.intermediate_size_per_partition
    return Work(nbytes * visited_share, visits * flops_of_visit)


def _work_on_cache(layout: CacheLayout, rows: int, context: int) -> Iterator[Work]:
    """Yield the work of each attention layer on its cache."""
    for layer in layout.layers.values():
        shape = cache_shape(layer, 1, layout.block_size, layout.dtype)
        elements_of_token = prod(shape) / layout.block_size
        # Tokens before the window are not read.
        window = layer.sliding_window or context
        seen = rows * min(context, window)
        elements = seen * elements_of_token
        nbytes = elements * layout.dtype.itemsize
        # All query heads of a group use the same key.
        flops = 2.0 * elements * layer.num_queries_per_kv
        yield Work(nbytes, flops)
