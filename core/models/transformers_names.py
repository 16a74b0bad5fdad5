"""Names in checkpoints of transformers' models: those that older versions gave, and those without the base model's."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from opgraft.errors import CheckpointError
from opgraft.models.extras import import_extra
from opgraft.models.names import WeightsMapper


@dataclass(frozen=True)
class TransformersNames(WeightsMapper):
    """Changes names as transformers does when it loads.

    Attributes:
        renamings: of transformers, applied in turn.
        computing: those of transformers that compute a tensor of several, which are not served.
        known: the names of the model.
    """

    renamings: tuple[Any, ...] = ()
    computing: tuple[Any, ...] = ()
    known: Set[str] = frozenset()

    @classmethod
    def of(cls, model: Any) -> TransformersNames:
        """Return those of a model of transformers."""
        transforms = import_extra("transformers.conversion_mapping").get_model_conversion_mapping(
            model
        )
        computing = tuple(one for one in transforms if hasattr(one, "operations"))
        renamings = tuple(one for one in transforms if one not in computing)
        known = frozenset(model.state_dict())
        return cls(
            renamings=renamings, computing=computing, base=model.base_model_prefix, known=known
        )

    def map(self, name: str) -> str:
        """Return the name in the model.

        Raises:
            CheckpointError: transformers computes a tensor of this one and others.
        """
        renamed = name
        for one in self.renamings:
            renamed, _ = one.rename_source_key(renamed)
        for one in self.computing:
            target, matched = one.rename_source_key(renamed)
            if matched is not None and renamed not in self.known:
                raise CheckpointError(
                    f"transformers computes {target!r:.200} of {name!r:.200} and others when it loads, which is not "
                    "served: save the model with the weights as they are computed"
                )
        return renamed
