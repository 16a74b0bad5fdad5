"""``Model``, the base of models made of opgraft's layers, and the registry by architecture."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """A model for one config: each rank constructs its own shard, with quantized layers.

    ``@PluggableClass.register("LlamaForCausalLM")`` registers a class for an architecture. A plugin
    adds an architecture in this way, and replaces one by ``register_oot``. Parameters have the
    names of checkpoints. ``packed_modules_mapping`` lists the merged layers.

    Args:
        opgraft_config: the ``model`` section names the checkpoint with the architecture's config.
        prefix: the path of this model in a larger one, as in checkpoints of the larger one.

    Attributes:
        config: the config of the architecture, from the checkpoint; ``None`` if ``opgraft_config``
            names no checkpoint.
        max_position: tokens of the longest context.
        dtype: the dtype of activations and caches.
        fitted_ropes: ropes that depend on the length of the context, with ``trained_positions``,
            ``gradual`` and ``fit_tokens`` of ``DynamicNTKScalingRotaryEmbedding``.
    """

    config: Any
    max_position: int
    dtype: torch.dtype
    fitted_ropes: Sequence[Any] = ()

    packed_modules_mapping: ClassVar[Mapping[str, Mapping[str, ShardId]]] = {}
    """Name of a merged layer → name of a layer of the checkpoint → id of the shard."""

    ignored_weights: Sequence[str] = ()
    """Patterns of tensors in checkpoints that this model does not read."""

    embedding_weight: ClassVar[str] = ""
    """The checkpoint's name of the embedding. The config's sizes are compared with its shape."""

    plain_config: ClassVar[bool] = False
    """The model reads only settings of a ``PlainConfig``, so that transformers is not imported."""

    stage_streams: ClassVar[int] = 0
    """Tensors ``[tokens, hidden_size]`` between stages of a pipeline; 0 without stages."""

    weights_mapper: WeightsMapper = WeightsMapper()
    """Changes of names in checkpoints to names of this model."""

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.opgraft_config = opgraft_config
        self.config = None
        longest = None
        if opgraft_config.model.name is not None:
            self.config = architecture_config(opgraft_config, plain=self.plain_config)
            text_config = self.config.get_text_config()
            longest = getattr(text_config, "max_position_embeddings", None)
        # State-space models have no longest context.
        self.max_position = opgraft_config.model.max_model_len or longest or sys.maxsize
        # The builder of models has set the default to the dtype of the weights.
        self.dtype = torch.get_default_dtype()


@runtime_checkable
class HasLogits(Protocol):
    """A model that generates tokens: logits ``[rows, vocab_size]`` follow from hidden states."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits; ``None`` on ranks that do not gather the logits."""


@runtime_checkable
class HasLabels(Protocol):
    """An encoder that tells the probabilities of labels.

    Attributes:
        labels: names, in the order of the probabilities.
    """

    labels: Sequence[str]

    def probabilities(self, first_states: Tensor) -> Tensor:
        """Return ``[texts, labels]``, float32, from the states of first tokens."""


_HEAD = re.compile(
    r"For(MaskedLM|PreTraining|(Sequence|Token)Classification|QuestionAnswering|MultipleChoice)$"
)
"""The end of the name of a model with a head that embeddings do not use."""


def model_classes() -> dict[str, type[Model]]:
    """Return architecture → registered class, with the classes of plugins."""
    load_plugins()
    records = host_state().registry.classes
    return {name: record.cls for name, record in records.items() if issubclass(record.cls, Model)}


def model_class(architectures: Iterable[str], implementation: str = "auto") -> type[Model]:
    """Return the class for the first architecture with a class.

    Args:
        architectures: names of classes, as in a config.
        implementation: ``model.implementation``. ``"auto"`` takes a registered class, else the
            class of transformers within a class of ours. ``"opgraft"`` and ``"transformers"`` take
            only a class of that kind.

    Raises:
        ModelError: there is no class, and the message has near matches. Or the registered class
            is no ``Model``.
    """
    wanted = list(architectures)
    known = model_classes()
    # As AutoModel does: the base model embeds texts, and a head for another task is not used.
    wanted += [_HEAD.sub("Model", name) for name in wanted if _HEAD.search(name)]
    if implementation != "transformers":
        for architecture in wanted:
            if architecture in known:
                return known[architecture]
    # Before transformers is imported, which takes seconds.
    _expect_models(wanted)
    foreign = {} if implementation == "opgraft" else _classes_of_transformers()
    for architecture in wanted:
        if architecture in foreign:
            return known[foreign[architecture]]
    raise _no_class(wanted, known, foreign, implementation)


def _no_class(
    wanted: Sequence[str],
    known: Mapping[str, type[Model]],
    foreign: Mapping[str, str],
    implementation: str,
) -> ModelError:
    """Make the error for architectures without a class."""
    name = wanted[0] if wanted else ""
    all_names = {**known, **foreign}
    # Transformers has hundreds of names. Without a near match, only our own are listed.
    near = close_matches(name, all_names if near_matches(name, all_names) else known)
    further = "transformers has no decoder or base model of it either"
    if implementation == "opgraft":
        further = "any architecture of transformers runs with --model.implementation transformers"
    return ModelError(
        f"no model is registered for the architecture {', '.join(wanted) or '(none is named)'}: "
        f"{near} A plugin adds one by @PluggableClass.register; {further}"
    )


def _expect_models(architectures: Iterable[str]) -> None:
    """Refuse an architecture with a registered class that is no model.

    Raises:
        ModelError: there is such a class.
    """
    records = host_state().registry.classes
    for architecture in architectures:
        record = records.get(architecture)
        if record is not None and not issubclass(record.cls, Model):
            raise ModelError(
                f"{architecture} is registered for {record.cls.__qualname__} at "
                f"{location_of(record.cls)}, which is no model: derive the class from "
                "opgraft.models.Model"
            )


def _classes_of_transformers() -> dict[str, str]:
    """Return architecture of transformers → the architecture of our class around such a model."""
    try:
        auto = importlib.import_module("transformers.models.auto.modeling_auto")
    # Models of opgraft and of plugins run without transformers.
    except ImportError:
        return {}
    base_models = _all_names(auto.MODEL_MAPPING_NAMES)
    decoders = _all_names(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return {
        **dict.fromkeys(base_models, "TransformersModel"),
        **dict.fromkeys(decoders, "TransformersForCausalLM"),
    }


def _all_names(mapping: Mapping[str, str | Sequence[str]]) -> Iterator[str]:
    """Yield the names in a mapping of transformers. Each value is a name or several names."""
    for names in mapping.values():
        if isinstance(names, str):
            yield names
        else:
            yield from names
