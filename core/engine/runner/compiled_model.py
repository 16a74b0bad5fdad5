"""The model of an engine, compiled as ``compilation_config`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.compilation.backends import backend_of
from opgraft.compilation.compiled import compile
from opgraft.compilation.stock import CompiledForGood
from opgraft.config import CompilationConfig, CompilationMode, OpgraftConfig
from opgraft.errors import ConfigError
from opgraft.models.encoder import SequenceAttention
from opgraft.ops.attention.cached import CachedAttention
from opgraft.ops.attention.node import AttentionNodes
from opgraft.ops.decoder_plan import HasPlan
from torch import Tensor

SIZES = (2, 1)
"""Tokens of the calls of the warm-up: the first makes a graph for any number, the second for 1."""


AttentionLayer = CachedAttention | SequenceAttention


class CompiledModel:
    """A model as one graph for any number of tokens. Each attention layer is a node of the graph.

    Args:
        model: called with token ids and positions.
        layers: attention layers of the model, by prefix.
        settings: of the compilation; the mode is not ``NONE``.
        strict: raise an error if ``torch.compile`` would compile anew after the warm-up.
    """

    def __init__(
        self,
        model: Any,
        layers: Mapping[str, AttentionLayer],
        settings: CompilationConfig,
        strict: bool = False,
    ) -> None:
        self.nodes = AttentionNodes(layers)
        self.settings = settings
        self.backend = str(settings.backend)
        self.strict = strict
        self._model = self._graph = model
        has_plan = isinstance(model, HasPlan) and settings.mode is CompilationMode.FULL
        self._plans = has_plan and not _is_asked_for(settings)
        for layer in layers.values():
            layer.is_node = True

    def __call__(self, input_ids: Tensor, positions: Tensor, *inputs_embeds: Tensor) -> Tensor:
        """Return the result of the model, usually hidden states.

        Args:
            input_ids: ``[tokens]``, int64.
            positions: ``[tokens]``, int64.
            *inputs_embeds: further inputs of a stage of a pipeline.
        """
        if self._plans:
            hidden: Tensor | None = self._model.planned(input_ids, positions, *inputs_embeds)
            if hidden is not None:
                return hidden
        with self.nodes.entered():
            computed: Tensor = self._graph(input_ids, positions, *inputs_embeds)
        return computed

    def warm_up(
        self, device: torch.device, empty: Callable[[int], Sequence[Tensor]] = lambda size: ()
    ) -> None:
        """Compile.

        Args:
            device: of the model.
            empty: returns the further inputs of the model for a number of tokens.

        Raises:
            ConfigError: the model cannot be traced, or the backend does not compile here.
        """

        def inputs(size: int) -> tuple[Tensor, ...]:
            tokens = torch.arange(size, device=device)
            return tokens, tokens.clone(), *empty(size)

        with self._explained():
            if self.settings.mode is CompilationMode.STOCK_TORCH_COMPILE:
                self._compile_stock(inputs)
            else:
                # Tensors of inference mode cannot be traced.
                with torch.inference_mode(False), self.nodes.entered():
                    self._graph = compile(self._model, self.settings, args=inputs(max(SIZES)))

    @torch.inference_mode()
    def _compile_stock(self, inputs: Callable[[int], tuple[Tensor, ...]]) -> None:
        backend_of(self.backend)
        graph: Any = torch.compile(self._model, backend=self.backend, dynamic=True, fullgraph=True)
        if self.strict:
            graph = CompiledForGood(self._model, graph, len(SIZES))
        # The inputs of a step are parts of one tensor. Without copies, torch.compile would make a
        # graph for the place of each part.
        self._graph = lambda *tensors: graph(*(each.clone() for each in tensors))
        for size in SIZES:
            self(*inputs(size))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        # Backends raise errors of all classes.
        except Exception as error:
            raise ConfigError(
                f"compilation_config.mode is set, and torch.compile with the backend {self.backend}"
                f" fails on the model: {described(error)}. Set compilation_config.mode to NONE, or "
                "another compilation_config.backend; inductor needs a C++ compiler, such as g++ or "
                "what CXX names"
            ) from error


def _is_asked_for(settings: CompilationConfig) -> bool:
    """Return True if settings change the graph, so that no plan may take its place."""
    return bool(settings.user_passes or settings.executed_otherwise)


def expect_compilable(config: OpgraftConfig) -> None:
    """Refuse settings of compilation that the engine cannot follow.

    Raises:
        ConfigError: settings contradict each other.
    """
    config.compilation_config.expect_followed()
    if config.compilation_config.mode in (None, CompilationMode.NONE):
        return
    if config.model.batch_invariant:
        raise ConfigError(
            "compilation_config.mode and model.batch_invariant are set, and compiled code does not "
            "compute each token alike: turn one of them off"
        )


def compiled_as_set(
    model: Any, layers: Mapping[str, AttentionLayer], states: Iterable[str], config: OpgraftConfig
) -> CompiledModel | None:
    """Return the compiled model; ``None`` if ``compilation_config.mode`` is ``NONE``.

    Args:
        model: to compile.
        layers: attention layers of the model, by prefix.
        states: prefixes of layers with a state of each sequence.
        config: resolved.

    Raises:
        ConfigError: the model has no graph.
    """
    if config.compilation_config.mode in (None, CompilationMode.NONE):
        return None
    if model.fitted_ropes:
        raise ConfigError(
            "compilation_config.mode is set, and the model has ropes that depend on the length of "
            "the context, which no graph has: set it to NONE"
        )
    for name in states:
        raise ConfigError(
            f"compilation_config.mode is set, and the layer {name!r} keeps a state of each "
            "sequence, which no graph has: set it to NONE"
        )
    return CompiledModel(model, layers, config.compilation_config, bool(config.strict))
