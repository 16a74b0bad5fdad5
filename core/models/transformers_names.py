"""Names in checkpoints of transformers' models.

Older versions of transformers gave other names, and checkpoints of a base model lack its path.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from opgraft.errors import CheckpointError
from opgraft.models.extras import import_extra
from opgraft.models.names import WeightsMapper


@dataclass(frozen=True)
class TransformersNames(WeightsMapper):
    """Changes names as transformers does on loading.

    Attributes:
        renamings: changes of names by transformers, applied in turn.
        computing: conversions by transformers that compute one tensor of several. Only layers of
            experts load the several tensors themselves.
        known: the names of the model.
        experts: paths of layers of experts, which load the tensors of each expert themselves.
    """

    renamings: tuple[Any, ...] = ()
    computing: tuple[Any, ...] = ()
    known: Set[str] = frozenset()
    experts: Set[str] = frozenset()

    @classmethod
    def of(cls, model: Any) -> TransformersNames:
        """Return the changes of names for a model of transformers."""
        conversions = import_extra("transformers.conversion_mapping")
        transforms = conversions.get_model_conversion_mapping(model)
        computing = tuple(one for one in transforms if hasattr(one, "operations"))
        renamings = tuple(one for one in transforms if one not in computing)
        known = frozenset(model.state_dict())
        return cls(
            renamings=renamings, computing=computing, base=model.base_model_prefix, known=known
        )

    def map(self, name: str) -> str:
        """Return the name in the model.

        Raises:
            CheckpointError: transformers computes a tensor of this tensor and others.
        """
        renamed = name
        for one in self.renamings:
            renamed, _ = one.rename_source_key(renamed)
        for one in self.computing:
            target, matched = one.rename_source_key(renamed)
            # A checkpoint may have the computed tensor already.
            if matched is None or renamed in self.known or self._loads_itself(one, target):
                continue
            raise CheckpointError(
                f"transformers computes {target!r:.200} of {name!r:.200} and others when it loads, "
                "which is not served: save the model with the weights as they are computed"
            )
        return renamed

    def _loads_itself(self, converter: Any, target: str) -> bool:
        """Return True if a layer of experts loads the tensors that a converter would put into one.

        Args:
            converter: of transformers.
            target: the name of that one tensor, with or without the path of the base model.
        """
        layer = target.rpartition(".")[0]
        prefix = f"{self.base}."
        spellings = {layer, prefix + layer, layer.removeprefix(prefix)}
        return bool(spellings & self.experts) and _stacks(converter)


_STACKS = (("MergeModulelist", 0),)
_PARTS = {
    ("gate_proj", "up_proj"): (*_STACKS, ("Concatenate", 1)),
    ("w1", "w3"): (*_STACKS, ("Concatenate", 1)),
    ("down_proj",): _STACKS,
    ("w2",): _STACKS,
}
"""Matrix of an expert → operations of transformers that stack the matrices of all experts."""


def _stacks(converter: Any) -> bool:
    """Return True if a converter stacks the matrices of experts, as ``FusedMoE`` loads them."""
    # The patterns are regular expressions, with "\." for a dot.
    patterns = [pattern.replace("\\", "") for pattern in converter.source_patterns]
    # A pattern of one part gives an empty name, and no matrix of an expert has that name.
    modules = [pattern.removesuffix("$").rpartition(".")[0] for pattern in patterns]
    matrices = tuple(module.rpartition(".")[2] for module in modules)
    operations = tuple(
        (type(each).__name__, getattr(each, "dim", None)) for each in converter.operations
    )
    return _PARTS.get(matrices) == operations
