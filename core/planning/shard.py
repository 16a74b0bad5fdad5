"""``Shard``, the part of a model on one rank of a split, and that rank's part of a step."""

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
from opgraft.planning.alike import computed_once
from opgraft.planning.imagined import ExpectedExchange, Transfer, imagined_rank, noted_by
from torch import nn

_NATIVE = OpgraftConfig(compilation_config=CompilationConfig(custom_ops=("none",)))
"""Tensors without memory are for no kernel."""


class _ImaginedLink(StageLink):
    """Passes tensors without memory on, which cannot tell that a stage has failed."""

    def _expect_computed(self) -> None:
        """Take it that the stage before has computed."""


class Work(NamedTuple):
    """Bytes that a step reads, and operations that it computes.

    Attributes:
        nbytes: read from the memory of the device, or written there.
        flops: a multiplication and an addition being two.
    """

    nbytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: object) -> Work:
        if not isinstance(other, Work):
            return NotImplemented
        return Work(self.nbytes + other.nbytes, self.flops + other.flops)


@dataclass(frozen=True)
class ShardStep:
    """A rank's part of a step in which each sequence gets a token.

    Attributes:
        weights: read and computed with.
        cache: likewise, of keys, values and states.
        transfers: collectives in the order of the step.
    """

    weights: Work
    cache: Work
    transfers: tuple[Transfer, ...]


class Shard:
    """The part of a model that one rank has, constructed as its loader does, of tensors without memory.

    Args:
        config: resolved; its section ``parallel`` is that of the split.
        layout: of all ranks.
        rank: of the job.

    Attributes:
        weight_bytes: of parameters and buffers, as they are loaded.
        dtype: of activations.
        cache: the layout of its cache.
        experts: of all ranks, in the layer that has most.

    Raises:
        OpgraftError: the model cannot be split so.
    """

    def __init__(self, config: OpgraftConfig, layout: ParallelLayout, rank: int) -> None:
        self._layout, self._rank = layout, rank
        with imagined_rank(layout, rank), set_config(_NATIVE):
            self._model: Any = describe_model(config)
            self._expect_exchange()
        self.dtype: torch.dtype = self._model.dtype
        self.weight_bytes = sum(
            tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers())
        )
        dtype = cache_dtype(config.cache.dtype, self.dtype)
        layers, states = attention_layers(self._model), state_layers(self._model)
        self.cache = CacheLayout.of(layers, config.cache.block_size, dtype, states)
        self.experts = max((each.num_experts for each in self._experts()), default=0)

    def layer_bytes(self) -> list[int]:
        """Return the bytes of each layer of the stack, those of the head with the last; of a rank that has all."""
        sizes: dict[int, int] = {}
        for name, parameter in self._model.named_parameters():
            if found := re.search(r"\blayers\.(\d+)\.", name):
                sizes[int(found[1])] = sizes.get(int(found[1]), 0) + parameter.nbytes
        head = getattr(self._model, "lm_head", None)
        if sizes and head is not None:
            sizes[max(sizes)] += sum(parameter.nbytes for parameter in head.parameters())
        return [sizes[number] for number in sorted(sizes)]

    @property
    def layers(self) -> int:
        """The number of layers that mix tokens."""
        return len(self.cache.layers) + len(self.cache.states)

    def step(self, rows: int, context: int) -> ShardStep:
        """See what a step does.

        Args:
            rows: sequences, each of which gets a token.
            context: tokens of each.
        """
        return ShardStep(
            weights=sum(_reading(self._model, rows, self._layout.data), Work()),
            cache=sum(
                _attending(self.cache, rows, context), Work(2.0 * rows * self.cache.bytes_per_state)
            ),
            transfers=self._transfers(rows) if self._layout.world > 1 else (),
        )

    @torch.inference_mode()
    def _transfers(self, rows: int) -> tuple[Transfer, ...]:
        """Run a step, and return the collectives in it."""
        with (
            imagined_rank(self._layout, self._rank) as parallelism,
            set_config(_NATIVE),
            torch.device("meta"),
        ):
            link = _ImaginedLink.of(self._model, torch.device("meta"))
            if link is not None:
                link.begin(rows)
            given = None if link is None else link.receive()
            with computed_once(self._model, parallelism):
                hidden = self._model(
                    torch.zeros(rows, dtype=torch.int64), torch.arange(rows), given
                )
            if link is not None:
                link.pass_on(hidden)
            if get_pp_group().is_last_rank and isinstance(self._model, HasLogits):
                self._model.compute_logits(hidden)
            return tuple(chain.from_iterable(noted_by(parallelism)))

    def _experts(self) -> Iterator[FusedMoE]:
        return (each for each in self._model.modules() if isinstance(each, FusedMoE))

    def _expect_exchange(self) -> None:
        """Have experts of several replicas exchange what is to be expected."""
        for layer in self._experts():
            if layer.exchange is not None and layer.placement is not None:
                expected: Any = ExpectedExchange(layer.num_experts, layer.placement.per_rank)
                layer.exchange = expected


def _reading(model: nn.Module, rows: int, replicas: int) -> Iterator[Work]:
    """Yield what each module reads of its weights, and computes with them."""
    head = getattr(model, "lm_head", None)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        nbytes = sum(parameter.nbytes for parameter in own)
        elements = sum(parameter.numel() for parameter in own if parameter.dim() > 1)
        if isinstance(module, FusedMoE):
            yield _routed(module, nbytes, rows, replicas)
        elif isinstance(module, VocabParallelEmbedding) and module is not head:
            yield Work(rows * nbytes / len(own[0]))
        elif isinstance(module, LinearBase):
            linear: Any = module  # whose sizes are those of subclasses
            yield Work(
                nbytes,
                2.0 * rows * linear.input_size_per_partition * linear.output_size_per_partition,
            )
        elif own:
            yield Work(nbytes, 2.0 * rows * elements)


def _routed(layer: FusedMoE, nbytes: int, rows: int, replicas: int) -> Work:
    """Return what experts do of which each is chosen equally often."""
    local, moe = len(layer.local_experts), layer.moe_config
    tokens = rows * (replicas if layer.exchange is not None else 1)
    touched = 1.0 - (1.0 - layer.top_k / layer.num_experts) ** tokens
    places = layer.num_experts + (0 if layer.placement is None else layer.placement.redundant)
    visits = tokens * layer.top_k * local / places
    return Work(
        nbytes * touched, visits * 6.0 * moe.hidden_dim * moe.intermediate_size_per_partition
    )


def _attending(layout: CacheLayout, rows: int, context: int) -> Iterator[Work]:
    """Yield what each attention layer reads of its cache, and computes with it."""
    for layer in layout.layers.values():
        elements = prod(cache_shape(layer, 1, layout.block_size, layout.dtype)) / layout.block_size
        seen = rows * min(context, layer.sliding_window or context)
        yield Work(
            seen * elements * layout.dtype.itemsize,
            2.0 * seen * elements * layer.num_queries_per_kv,
        )
