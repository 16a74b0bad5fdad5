"""Models of plugins, made of vLLM's layers: ``vllm.ModelRegistry``."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

from opgraft import OpgraftConfig, PluggableClass, init_logger
from opgraft.errors import ConflictError, ModelError
from opgraft.models import Model, model_classes, quantization_config
from opgraft.ops import QKVParallelLinear
from opgraft.plugins.bridges import shortened
from torch import Tensor

from opgraft_vllm_bridge.vllm_parts.config import current_settings
from opgraft_vllm_bridge.vllm_parts.model_configs import check_settings
from opgraft_vllm_bridge.vllm_parts.weight_names import InnerNames

_GENERATES = re.compile("For(CausalLM|ConditionalGeneration)$")
_PATH = re.compile(r"\w+(\.\w+)*:\w+")
_QKV = ("q", "k", "v")

logger = init_logger("opgraft.vllm_bridge")


class VllmModel(Model):
    """A model of a plugin, constructed with vLLM's settings.

    A checkpoint fills the model's parameters by name.

    Attributes:
        theirs: the plugin's class, or a path such as ``package.module:Class``.
    """

    theirs: ClassVar[type | str]

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        cls = self._their_class()
        table = getattr(cls, "packed_modules_mapping", {})
        # The config of a quantization reads the names before there are layers.
        type(self).packed_modules_mapping = merged_layers(table, {})
        theirs = getattr(cls, "hf_to_vllm_mapper", None)
        self.weights_mapper = InnerNames(prefixes={"": "inner."}, theirs=theirs)
        check_settings(type(self).__name__)
        settings = current_settings()
        settings.quant_config = quantization_config(opgraft_config, self)
        self.inner = cls(vllm_config=settings.sealed(), prefix=prefix)
        layers = {path.rpartition(".")[2]: layer for path, layer in self.inner.named_modules()}
        merged = theirs.merged() if theirs else {}
        type(self).packed_modules_mapping = merged_layers(table, layers) | merged
        # The loader of weights reads the inner model's table, and needs opgraft's form.
        self.inner.packed_modules_mapping = self.packed_modules_mapping
        self._parameters_of_forward = frozenset(inspect.signature(self.inner.forward).parameters)

    def _their_class(self) -> Any:
        """Return the plugin's class, imported if only the path is known."""
        if not isinstance(self.theirs, str):
            return self.theirs
        module, _, name = self.theirs.partition(":")
        return getattr(importlib.import_module(module), name)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states ``[tokens, hidden_size]``."""
        optional = {"inputs_embeds": inputs_embeds, "intermediate_tensors": None}
        taken = self._parameters_of_forward
        others = {name: value for name, value in optional.items() if name in taken}
        hidden: Tensor = self.inner(input_ids=input_ids, positions=positions, **others)
        return hidden


class VllmDecoder(VllmModel):
    """A model of a plugin that generates tokens."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return ``[tokens, vocab_size]``, or None if another rank has the logits."""
        logits: Tensor | None = self.inner.compute_logits(hidden_states)
        return logits


def merged_layers(
    table: Mapping[str, Sequence[str]], layers: Mapping[str, Any]
) -> dict[str, dict[str, int | str]]:
    """Return merged layer → layer of the checkpoint → shard id.

    Example: ``{"gate_up_proj": {"gate_proj": 0, "up_proj": 1}}``.

    Args:
        table: vLLM's table, merged layer → layers of the checkpoint. A row with one layer merges
            nothing and is left out.
        layers: the layers of the model by name. A ``QKVParallelLinear`` has letters for ids.

    Raises:
        ModelError: a ``QKVParallelLinear`` is not made of three layers.
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
    """Return the shard ids of attention's layers: their first letters, or else q, k and v."""
    if len(parts) != len(_QKV):
        raise ModelError(
            f"packed_modules_mapping has {len(parts)} layers for {merged!r}, a QKVParallelLinear: "
            "list those of query, key and value"
        )
    letters = [part[:1] for part in parts]
    if sorted(letters) == sorted(_QKV):
        return letters
    return [*_QKV]


class _ModelRegistry:
    """Registers models of plugins by architecture."""

    def register_model(self, model_arch: str, model_cls: type | str) -> None:
        """Register a model for an architecture.

        If the architecture has a model already, that model stays, and a warning is logged.

        Args:
            model_arch: the name in the config of a checkpoint.
            model_cls: a class, or a path such as ``package.module:Class``. The class of a path is
                imported when the model is constructed.

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
