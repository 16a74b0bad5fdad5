"""The model of an engine, compiled as ``compilation_config`` says."""

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
"""Tokens of the calls by which ``torch.compile`` compiles: a graph for any number, and one for a single token."""


AttentionLayer = CachedAttention | SequenceAttention


class CompiledModel:
    """A model as one graph for any number of tokens, in which each attention layer is a node.

    Args:
        model: called with token ids and positions.
        layers: its attention layers by prefix.
        settings: how to compile it; their mode is not ``NONE``.
        strict: whether it is an error if ``torch.compile`` would compile anew after the warm-up.
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
        self._plans = (
            isinstance(model, HasPlan)
            and settings.mode is CompilationMode.FULL
            and not _is_asked_for(settings)
        )
        for layer in layers.values():
            layer.is_node = True

    def __call__(self, input_ids: Tensor, positions: Tensor, *inputs_embeds: Tensor) -> Tensor:
        """Return what the model does, as a rule hidden states; the first two arguments are ``[tokens]``, int64."""
        hidden: Tensor | None = (
            self._model.planned(input_ids, positions, *inputs_embeds) if self._plans else None
        )
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
            empty: returns what the model is called with besides ids and positions of so many
                tokens.

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
                # What is made in inference mode cannot be traced.
                with torch.inference_mode(False), self.nodes.entered():
                    self._graph = compile(self._model, self.settings, args=inputs(max(SIZES)))

    @torch.inference_mode()
    def _compile_stock(self, inputs: Callable[[int], tuple[Tensor, ...]]) -> None:
        backend_of(self.backend)
        graph: Any = torch.compile(self._model, backend=self.backend, dynamic=True, fullgraph=True)
        if self.strict:
            graph = CompiledForGood(self._model, graph, len(SIZES))
        # A step's are parts of one tensor, and a graph would be for the place of each in it.
        self._graph = lambda *tensors: graph(*(each.clone() for each in tensors))
        for size in SIZES:
            self(*inputs(size))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # whatever a backend raises
            raise ConfigError(
                f"compilation_config.mode is set, and torch.compile with the backend {self.backend} fails on the "
                f"model: {described(error)}. Set compilation_config.mode to NONE, or another "
                "compilation_config.backend; inductor needs a C++ compiler, such as g++ or what CXX names"
            ) from error


def _is_asked_for(settings: CompilationConfig) -> bool:
    """Tell whether settings say how the graph runs, so that nothing may compute in its place."""
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
            "compilation_config.mode and model.batch_invariant are set, and compiled code does not compute each token "
            "alike: turn one of them off"
        )


def compiled_as_set(
    model: Any, layers: Mapping[str, AttentionLayer], states: Iterable[str], config: OpgraftConfig
) -> CompiledModel | None:
    """Return the model compiled as ``compilation_config`` says; ``None`` for its mode ``NONE``.

    Args:
        model: to be compiled.
        layers: its attention layers by prefix.
        states: prefixes of layers that keep a state of each sequence.
        config: resolved.

    Raises:
        ConfigError: it has no graph.
    """
    if config.compilation_config.mode in (None, CompilationMode.NONE):
        return None
    if model.fitted_ropes:
        raise ConfigError(
            "compilation_config.mode is set, and the model has ropes that depend on the length of the context, which "
            "no graph has: set it to NONE"
        )
    for name in states:
        raise ConfigError(
            f"compilation_config.mode is set, and the layer {name!r} keeps a state of each "
            "sequence, which no graph has: set it to NONE"
        )
    return CompiledModel(model, layers, config.compilation_config, bool(config.strict))
