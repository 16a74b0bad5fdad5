"""``vllm.ModelRegistry``: models of plugins that are made of vLLM's layers."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

from opgraft import OpgraftConfig, PluggableClass, init_logger
from opgraft.errors import ConflictError, ModelError
from opgraft.models import Model, WeightsMapper, model_classes, quantization_config
from opgraft.ops import QKVParallelLinear
from opgraft.plugins.bridges import shortened
from torch import Tensor

from opgraft_vllm_bridge.vllm_parts.config import current_settings

_GENERATES = re.compile("For(CausalLM|ConditionalGeneration)$")
_PATH = re.compile(r"\w+(\.\w+)*:\w+")
_QKV = ("q", "k", "v")

logger = init_logger("opgraft.vllm_bridge")


class VllmModel(Model):
    """A model of a plugin, constructed with vLLM's settings. The checkpoint fills its parameters by name.

    Attributes:
        theirs: the plugin's class, or the path of one as ``package.module:Class``.
    """

    theirs: ClassVar[type | str]

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        cls = self.theirs
        if isinstance(cls, str):
            module, _, name = cls.partition(":")
            cls = getattr(importlib.import_module(module), name)
        merged = getattr(cls, "packed_modules_mapping", {})
        # The config of a quantization reads the names before there are layers.
        type(self).packed_modules_mapping = merged_layers(merged, {})
        self.weights_mapper = WeightsMapper(prefixes={"": "inner."})
        settings = current_settings()
        settings.quant_config = quantization_config(opgraft_config, self)
        make: Any = cls
        self.inner = make(vllm_config=settings.sealed(), prefix=prefix)
        layers = {path.rpartition(".")[2]: layer for path, layer in self.inner.named_modules()}
        type(self).packed_modules_mapping = merged_layers(merged, layers)
        # In place of vLLM's table, which the loader of weights would read.
        self.inner.packed_modules_mapping = self.packed_modules_mapping
        self._taken = frozenset(inspect.signature(self.inner.forward).parameters)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states ``[tokens, hidden_size]``."""
        given = {"inputs_embeds": inputs_embeds, "intermediate_tensors": None}
        others = {name: value for name, value in given.items() if name in self._taken}
        hidden: Tensor = self.inner(input_ids=input_ids, positions=positions, **others)
        return hidden


class VllmDecoder(VllmModel):
    """A model of a plugin that generates tokens."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits: Tensor | None = self.inner.compute_logits(hidden_states)
        return logits


def merged_layers(
    table: Mapping[str, Sequence[str]], layers: Mapping[str, Any]
) -> dict[str, dict[str, int | str]]:
    """Return by merged layer the layers of the checkpoint, each with the id of its shard.

    Args:
        table: vLLM's, which lists the layers alone. A row with one layer merges nothing and is left
            out.
        layers: of the model, by name. A ``QKVParallelLinear`` has letters for ids.

    Raises:
        ModelError: a ``QKVParallelLinear`` is made of another number of layers than three.
    """
    found: dict[str, dict[str, int | str]] = {}
    for merged, parts in table.items():
        if len(parts) < 2:
            continue
        ids: Sequence[int | str] = range(len(parts))
        if isinstance(layers.get(merged), QKVParallelLinear):
            ids = _letters(merged, parts)
        found[merged] = dict(zip(parts, ids, strict=True))
    return found


def _letters(merged: str, parts: Sequence[str]) -> list[str]:
    """Return the letters of the layers of attention: those of their names, else in the order q, k, v."""
    if len(parts) != len(_QKV):
        raise ModelError(
            f"packed_modules_mapping has {len(parts)} layers for {merged!r}, a QKVParallelLinear: list "
            "those of query, key and value"
        )
    letters = [part[:1] for part in parts]
    return letters if sorted(letters) == sorted(_QKV) else [*_QKV]


class _ModelRegistry:
    """Takes models of plugins, by architecture."""

    def register_model(self, model_arch: str, model_cls: type | str) -> None:
        """Register a model for an architecture. If it has a model, a warning says so and it stays.

        Args:
            model_arch: as in the config of a checkpoint.
            model_cls: a class, or its path as ``package.module:Class``, which is imported when it is
                needed.

        Raises:
            ModelError: the path has another form.
        """
        if isinstance(model_cls, str) and not _PATH.fullmatch(model_cls):
            raise ModelError(f"the model {model_cls!r:.80} is no path: give package.module:Class")
        base = VllmDecoder if _GENERATES.search(model_arch) else VllmModel
        module = model_cls.partition(":")[0] if isinstance(model_cls, str) else model_cls.__module__
        members = {"theirs": model_cls, "__module__": module}
        try:
            PluggableClass.register(model_arch)(type(model_arch, (base,), members))
        except ConflictError as error:
            logger.warning(
                "the model of a plugin for %r is left out, as the architecture has one: %s",
                shortened(model_arch),
                error,
            )

    def get_supported_archs(self) -> Set[str]:
        """Return the architectures that have a model."""
        return model_classes().keys()


ModelRegistry = _ModelRegistry()
