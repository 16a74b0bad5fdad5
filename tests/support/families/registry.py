"""Which model stands for each family of transformers."""

from __future__ import annotations

import transformers
from transformers.models.auto import configuration_auto, modeling_auto

_FIRST = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")


def families() -> dict[str, list[str]]:
    """The names of model classes of each family, the one to try first in front.

    A family is a folder of transformers' models with at least one entry in a registry of models. A causal, an
    encoder-decoder or a masked language model comes before the bare model, and that before any other head.
    """
    registries = {
        name.removesuffix("_MAPPING_NAMES"): names
        for name, names in vars(modeling_auto).items()
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")
    }
    order = [f"MODEL_FOR_{task}" for task in _FIRST] + ["MODEL"]
    order += sorted(registries.keys() - set(order))
    found: dict[str, list[str]] = {}
    for model_type in sorted(configuration_auto.CONFIG_MAPPING_NAMES):
        family = configuration_auto.model_type_to_module_name(model_type)
        entries = [registries[name][model_type] for name in order if model_type in registries[name]]
        names = [
            name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)
        ]
        if model_type == family:
            found[family] = names + found.get(family, [])
        elif names:
            found.setdefault(family, []).extend(names)
    return {family: list(dict.fromkeys(names)) for family, names in sorted(found.items()) if names}


def model_class(name: str) -> type[transformers.PreTrainedModel]:
    """The class of that name; raises ``AttributeError`` or ``ImportError`` where it needs what is not installed."""
    cls: type[transformers.PreTrainedModel] = getattr(transformers, name)
    return cls
