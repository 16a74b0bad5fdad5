"""``Model``, the base of models that are written against the layers, and their registry by architecture."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.errors import ModelError, close_matches, near_matches
from opgraft.models.description import architecture_config
from opgraft.models.names import ShardId, WeightsMapper
from opgraft.plugins.host import load_plugins
from opgraft.registry.op_classes import location_of
from opgraft.registry.state import host_state
from torch import Tensor, nn


class Model(PluggableClass, nn.Module):
    """A model that is made for one config: a shard of it on each rank, quantized as it is made.

    A class serves the architecture that it is registered for by ``@PluggableClass.register("LlamaForCausalLM")``. A
    plugin adds architectures so, and replaces one by ``register_oot``. Parameters have the names that checkpoints use;
    layers that hold several one after another stand in ``packed_modules_mapping``.

    Args:
        opgraft_config: its ``model`` section names the checkpoint, which has the architecture's config.
        prefix: the path of this model in a larger one, as checkpoints of that one have it.

    Attributes:
        config: of the architecture, from the checkpoint; ``None`` where ``opgraft_config`` names none.
        max_position: tokens of the longest context.
        dtype: of activations, and so of caches.
        fitted_ropes: ropes that depend on the length of the context, with ``trained_positions``, ``gradual`` and
            ``fit_tokens`` of ``DynamicNTKScalingRotaryEmbedding``.
    """

    config: Any
    max_position: int
    dtype: torch.dtype
    fitted_ropes: Sequence[Any] = ()

    packed_modules_mapping: ClassVar[Mapping[str, Mapping[str, ShardId]]] = {}
    """Last name of a merged layer → those of the layers of a checkpoint that it holds, each with its shard's id."""
    ignored_weights: Sequence[str] = ()
    """Patterns of tensors that checkpoints have and this model does not read."""
    embedding_weight: ClassVar[str] = ""
    """The checkpoint's name of the embedding ``[vocab_size, hidden_size]``, which its config is checked against."""
    plain_config: ClassVar[bool] = False
    """Reads no more of its config than a ``PlainConfig`` has, which spares the import of transformers."""
    stage_streams: ClassVar[int] = 0
    """Tensors ``[tokens, hidden_size]`` that a stage of a pipeline passes to the next; 0: it is not cut into stages."""
    weights_mapper: WeightsMapper = WeightsMapper()
    """Changes of the names that checkpoints have to those of this model."""

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.opgraft_config = opgraft_config
        named = opgraft_config.model.name is not None
        self.config = (
            architecture_config(opgraft_config, plain=self.plain_config) if named else None
        )
        longest = (
            None
            if self.config is None
            else getattr(self.config.get_text_config(), "max_position_embeddings", None)
        )
        self.max_position = opgraft_config.model.max_model_len or longest or sys.maxsize
        self.dtype = torch.get_default_dtype()


@runtime_checkable
class HasLogits(Protocol):
    """A model that generates: of hidden states it makes logits ``[rows, vocab_size]``."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits; ``None`` on ranks that do not gather them."""


_HEAD = re.compile(
    r"For(MaskedLM|PreTraining|(Sequence|Token)Classification|QuestionAnswering|MultipleChoice)$"
)
"""The end of the name of a model whose head embeddings do not use."""


def model_classes() -> dict[str, type[Model]]:
    """Return the classes that are registered for architectures, those of plugins with them."""
    load_plugins()
    records = host_state().registry.classes
    return {name: record.cls for name, record in records.items() if issubclass(record.cls, Model)}


def model_class(architectures: Iterable[str], implementation: str = "auto") -> type[Model]:
    """Return the class for the first of the architectures, as a config lists them, that has one.

    Args:
        architectures: names of classes.
        implementation: ``model.implementation``: ``"auto"`` takes the class of transformers, within one of ours, where
            none is registered; ``"opgraft"`` and ``"transformers"`` take one of that kind only.

    Raises:
        ModelError: none has; the message has near matches. Or a class is registered for one, and is no ``Model``.
    """
    wanted, known = list(architectures), model_classes()
    # A head for another task is not used: the base model embeds texts, as AutoModel does.
    wanted += [_HEAD.sub("Model", name) for name in wanted if _HEAD.search(name)]
    if implementation != "transformers":
        for architecture in wanted:
            if architecture in known:
                return known[architecture]
    _expect_models(wanted)
    foreign = {} if implementation == "opgraft" else _classes_of_transformers()
    for architecture in wanted:
        if architecture in foreign:
            return known[foreign[architecture]]
    name, all_names = wanted[0] if wanted else "", {**known, **foreign}
    # Transformers has hundreds.
    near = close_matches(name, all_names if near_matches(name, all_names) else known)
    further = "transformers has no decoder or base model of it either"
    if implementation == "opgraft":
        further = "any architecture of transformers runs with --model.implementation transformers"
    raise ModelError(
        f"no model is registered for the architecture {', '.join(wanted) or '(none is named)'}: {near} A plugin adds "
        f"one by @PluggableClass.register; {further}"
    )


def _expect_models(architectures: Iterable[str]) -> None:
    """Raise where an architecture's name is that of a registered class that is no model."""
    records = host_state().registry.classes
    for architecture in architectures:
        record = records.get(architecture)
        if record is not None and not issubclass(record.cls, Model):
            raise ModelError(
                f"{architecture} is registered for {record.cls.__qualname__} at {location_of(record.cls)}, which is no "
                "model: derive the class from opgraft.models.Model"
            )


def _classes_of_transformers() -> dict[str, str]:
    """Return the architectures that run through transformers, to the name of the class of ours around them."""
    try:
        auto = importlib.import_module("transformers.models.auto.modeling_auto")
    except ImportError:
        return {}
    bases = (name for names in auto.MODEL_MAPPING_NAMES.values() for name in _as_names(names))
    decoders = (
        name
        for names in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in _as_names(names)
    )
    return {
        **dict.fromkeys(bases, "TransformersModel"),
        **dict.fromkeys(decoders, "TransformersForCausalLM"),
    }


def _as_names(names: str | Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names
