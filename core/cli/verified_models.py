"""The models for ``opgraft verify``: a checkpoint as usual or grafted, or a function's model."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opgraft.base.text import described, printable
from opgraft.binding.comparison import copied
from opgraft.cli.comparison import native_config
from opgraft.config import OpgraftConfig, set_config
from opgraft.engine.runner.cache_layout import CacheLayout, cache_dtype
from opgraft.errors import InputError
from opgraft.grafting import graft
from opgraft.models.build import dtype_of, load_model
from opgraft.models.config import LOCAL_ONLY, read_config
from opgraft.models.extras import import_extra
from opgraft.models.files import open_weights
from opgraft.models.model import HasLogits
from opgraft.ops.attention.batch import AttentionBatch, LayerStates
from opgraft.ops.attention.cached import CachedAttention
from opgraft.ops.attention.decoder import attention_layers
from opgraft.ops.state_space.layer import StateLayer, state_layers
from opgraft.plugins.host import load_plugins
from opgraft.serving.engine_settings import engine_config
from opgraft.serving.tokenizer import find_tokenizer
from opgraft.testing.verification import Steps, VerifiedStep
from torch import Tensor, nn


@dataclass(frozen=True)
class Pair:
    """A model on native definitions, the same model with kernels and plugins, and the calls.

    Attributes:
        native: the model on native definitions.
        grafted: the other model.
        steps: makes the calls.
        paths: folders to import the models' classes from, beside installed packages.
    """

    native: nn.Module
    grafted: nn.Module
    steps: Steps
    paths: list[str]


def as_it_runs(name: str, prompt: str | None, tokens: int) -> Pair:
    """Load the model of a checkpoint twice, as ``opgraft run`` does.

    The first call has all tokens but the last, the second call has the last one.

    Raises:
        InputError: there are fewer than two tokens, or a prompt and no tokenizer.
        OpgraftError: as ``load_model``.
    """
    config = engine_config(name, None, {}).resolved()
    with set_config(native_config()):
        # The config of an engine holds the settings of its scope, so this model has another one.
        native = load_model(engine_config(name, None, {}).resolved())
    model = load_model(config)
    ids = _token_ids(name, prompt, tokens)

    def steps(model: nn.Module) -> Sequence[VerifiedStep]:
        return decoder_steps(model, ids, config)

    return Pair(native, model, steps, [])


def grafted(name: str, prompt: str | None, tokens: int) -> Pair:
    """Load the model of a checkpoint with the class of transformers, and graft a copy.

    Raises:
        InputError: the checkpoint is a GGUF file, transformers cannot load it, or as
            ``as_it_runs``.
    """
    weights = open_weights(name)
    if weights.is_gguf:
        raise InputError(
            f"{weights.path} is a GGUF file, which transformers has no class for: leave --graft out"
        )
    config = read_config(weights)
    transformers = import_extra("transformers")
    folder = weights.path if weights.path.is_dir() else weights.path.parent
    try:
        cls = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        dtype = dtype_of(engine_config(name, None, {}).resolved(), config)
        native = cls.from_pretrained(folder, dtype=dtype, use_safetensors=True, **LOCAL_ONLY).eval()
    # The code of the model may raise any error.
    except Exception as error:
        raise InputError(f"transformers cannot load {folder}: {described(error)}") from error
    ids = _token_ids(name, prompt, tokens)[None]
    return _grafted(native, {"input_ids": ids, "use_cache": False}, [])


def made_by(name: str) -> Pair:
    """Call a function ``module:function`` for a model with arguments, and graft a copy.

    Raises:
        InputError: there is no such function, or the function raises or returns something else.
    """
    module, _, function = name.partition(":")
    # The console script does not import from the current folder, as python -m does.
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        native, given = getattr(importlib.import_module(module), function)()
    # Of the function itself, or of its import.
    except Exception as error:
        raise InputError(
            f"{printable(name)} gives no model: {described(error)}. MODEL is a checkpoint, or "
            "module:function, of a function without arguments that returns a model and a tuple or "
            "a dict of what to call it with"
        ) from error
    if not isinstance(native, nn.Module) or not isinstance(given, tuple | dict):
        raise InputError(
            f"{printable(name)} returned {type(native).__name__} and {type(given).__name__}: it is "
            "to return a torch.nn.Module, and a tuple or a dict of what to call it with"
        )
    return _grafted(native.eval(), given, [folder])


def _grafted(native: nn.Module, given: tuple[Any, ...] | dict[str, Any], paths: list[str]) -> Pair:
    def call(model: nn.Module) -> Any:
        # A model may write to arguments, such as a cache.
        fresh = copied(given, {})
        return model(**fresh) if isinstance(fresh, dict) else model(*fresh)

    load_plugins()
    model = copy.deepcopy(native)
    graft(model)
    return Pair(native, model, lambda _: [VerifiedStep(call)], paths)


def _token_ids(name: str, prompt: str | None, tokens: int) -> Tensor:
    """Return the tokens of a prompt, or random tokens, always the same."""
    weights = open_weights(name)
    if prompt is None:
        size = int(read_config(weights).get_text_config().vocab_size)
        return torch.randint(size, (tokens,), generator=torch.Generator().manual_seed(0))
    tokenizer = find_tokenizer(weights)
    if tokenizer is None:
        raise InputError(
            f"{weights.path} has no tokenizer for the prompt: leave it out, for --tokens random "
            "tokens"
        )
    ids = torch.tensor(tokenizer.encode(prompt))
    if len(ids) < 2:
        raise InputError(f"the prompt is {len(ids)} tokens long: give one of two tokens at least")
    return ids


def _table(blocks: int) -> Tensor:
    # Block 0 stays unused.
    return torch.arange(1, blocks + 1)[None]


def decoder_steps(model: Any, ids: Tensor, config: OpgraftConfig) -> Sequence[VerifiedStep]:
    """Return the calls of a decoder; one call for all tokens if the model has no cache."""
    device = next(model.parameters()).device
    ids = ids.to(device)
    count = len(ids)
    positions = torch.arange(count, device=device)
    layers = attention_layers(model)
    states = state_layers(model)
    # Without layers that keep something, all tokens are one call.
    if not layers and not states:
        return [VerifiedStep(_called(ids, positions))]

    size = config.cache.block_size
    blocks = -(-count // size)
    caches = _caches_of(model, layers, config, blocks)
    kept = _states_of(model, layers, states, config)
    table = _table(blocks)

    def step(start: int, end: int) -> VerifiedStep:
        batch = AttentionBatch.of_sequences(
            [end - start],
            [end],
            table,
            caches,
            block_size=size,
            max_context_len=count,
            device=device,
        )
        batch = dataclasses.replace(batch, states=kept)
        return VerifiedStep(_called(ids[start:end], positions[start:end]), batch)

    # The last token is a call of its own, as in generation.
    return [step(0, count - 1), step(count - 1, count)]


def _caches_of(
    model: Any, layers: Mapping[str, CachedAttention], config: OpgraftConfig, blocks: int
) -> dict[str, Tensor]:
    """Return a cache of zeros for each layer."""
    device = next(model.parameters()).device
    size = config.cache.block_size
    dtype = cache_dtype(config.cache.dtype, model.dtype)
    caches = {}
    for name, layer in layers.items():
        layout = CacheLayout.of({name: layer}, size, dtype)
        caches[name] = layout.allocate(blocks + 1, device)[name].zero_()
    return caches


def _states_of(
    model: Any,
    layers: Mapping[str, CachedAttention],
    states: Mapping[str, StateLayer],
    config: OpgraftConfig,
) -> dict[str, LayerStates]:
    """Return the states of one sequence, in slot 1 of each layer with states."""
    device = next(model.parameters()).device
    dtype = cache_dtype(config.cache.dtype, model.dtype)
    layout = CacheLayout.of(layers, config.cache.block_size, dtype, states)
    slots = torch.ones(1, dtype=torch.int64, device=device)
    held = layout.states_of_layers(layout.allocate_states(2, device))
    return {name: LayerStates(tensors, slots) for name, tensors in held.items()}


def _called(ids: Tensor, positions: Tensor) -> Callable[[nn.Module], Any]:
    def call(model: Any) -> Any:
        hidden = model(ids, positions)
        return model.compute_logits(hidden) if isinstance(model, HasLogits) else hidden

    return call
