"""The configuration and the tokenizer of a checkpoint, from local files only and running no code in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from opgraft.base.text import described
from opgraft.errors import CheckpointError
from opgraft.models.extras import import_extra
from opgraft.models.files import Weights, read_json
from opgraft.models.gguf_names import config_values
from opgraft.models.plain_config import own_config, plain_config

LOCAL_ONLY: Mapping[str, Any] = MappingProxyType(
    {"local_files_only": True, "trust_remote_code": False}
)
"""Arguments under which transformers asks no hub and runs no code of a checkpoint."""

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_LAYERS = 4096
_IMPLEMENTATIONS = frozenset(
    f"{part}_implementation{end}" for part in ("attn", "experts") for end in ("", "_internal")
)
_LOCAL = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""The implementations that transformers itself has; it may fetch others."""


def read_config(weights: Weights, *, plain: bool = False) -> Any:
    """Return the configuration of a checkpoint as the class of transformers for its ``model_type``.

    Args:
        weights: of the checkpoint.
        plain: a ``PlainConfig`` will do, for which transformers is not imported; settings that are not usual are read
            by transformers all the same.

    Raises:
        CheckpointError: ``config.json`` is missing, broken, needs code of its own, or names an implementation of a hub;
            the architecture of a GGUF file is not known.
        InputError: transformers is not installed.
    """
    file = weights.path if weights.is_gguf else _folder(weights) / "config.json"
    values = (
        config_values(weights.metadata, weights.stored, file)
        if weights.is_gguf
        else check_config(file)
    )
    _expect_plausible(values, file)
    if (found := own_config(values, file) or (plain_config(values) if plain else None)) is not None:
        return found
    transformers = import_extra("transformers")
    try:
        if weights.is_gguf:
            return transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        with _quiet(transformers):
            return transformers.AutoConfig.from_pretrained(file.parent, **LOCAL_ONLY)
    except Exception as error:  # damaged values make transformers raise nearly anything
        version = f"transformers {transformers.__version__}"
        _refuse_code(file, error, version)
        _refuse_unknown(file, values.get("model_type"), transformers)
        raise CheckpointError(
            f"{version} cannot read the configuration in {file}: {described(error)}"
        ) from error


def _expect_plausible(values: Mapping[str, Any], file: Path) -> None:
    """Refuse as many layers as no machine holds, before anybody makes lists of them.

    Raises:
        CheckpointError: there are as many.
    """
    for key, value in _settings_of_config(values):
        if key in _LAYERS and isinstance(value, int) and value > _MOST_LAYERS:
            raise CheckpointError(
                f"{file}: {key} is {value!r:.40}, and no model has more than {_MOST_LAYERS:,} layers: download it again"
            )


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers from warning of what an error tells, or what opgraft reads otherwise."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def load_tokenizer(weights: Weights) -> Any:
    """Load the tokenizer of a checkpoint, with its chat template.

    Raises:
        CheckpointError: there is none, or transformers rejects it.
        InputError: transformers is not installed.
    """
    transformers = import_extra("transformers")
    place = {"gguf_file": weights.path.name} if weights.is_gguf else {}
    try:
        return transformers.AutoTokenizer.from_pretrained(_folder(weights), **place, **LOCAL_ONLY)
    except Exception as error:  # as above
        version = f"transformers {transformers.__version__}"
        _refuse_code(_folder(weights) / "tokenizer_config.json", error, version)
        raise CheckpointError(
            f"{version} cannot load the tokenizer of {weights.path}: {described(error)}"
        ) from error


def check_config(file: Path) -> dict[str, Any]:
    """Read a ``config.json`` and refuse what would run code from elsewhere.

    Raises:
        CheckpointError: it is missing, broken, or names an implementation that transformers may fetch from a hub.
    """
    if not file.is_file():
        raise CheckpointError(
            f"{file.parent} has no config.json: it is no Hugging Face checkpoint folder"
        )
    config = read_json(file)
    names = config.get("architectures")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise CheckpointError(
            f"{file}: architectures is {names!r:.200}, expected a list of class names"
        )
    for key, value in _settings_of_config(config):
        if key.lstrip("_") in _IMPLEMENTATIONS and value not in _LOCAL:
            raise CheckpointError(
                f"{file}: {key} is {value!r:.80}, which is refused: transformers may take it from a hub and run it. "
                f"Remove it, or use one of {', '.join(map(repr, _LOCAL[1:]))}."
            )
    return config


def _refuse_code(file: Path, error: Exception, version: str) -> None:
    """Say so where transformers failed on a file because it may not run the code that the file names.

    Raises:
        CheckpointError: the file names code.
    """
    if (
        isinstance(error, ValueError)
        and file.suffix == ".json"
        and file.is_file()
        and "auto_map" in read_json(file)
    ):
        raise CheckpointError(
            f"{file} needs Python code of its own (auto_map), which is refused: it would run with your rights. Use a "
            f"checkpoint whose architecture {version} knows."
        ) from error


def _refuse_unknown(file: Path, kind: object, transformers: Any) -> None:
    """Say so where nobody has registered a class for the ``model_type`` of a config.

    Raises:
        CheckpointError: nobody has.
    """
    if isinstance(kind, str) and kind not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{file}: model_type is {kind!r:.80}, which neither transformers {transformers.__version__} nor an active "
            "plugin has. If a plugin brings the model, install it, or see why it is not active: opgraft plugins doctor"
        )


def _folder(weights: Weights) -> Path:
    return weights.path if weights.path.is_dir() else weights.path.parent


def _settings_of_config(config: object) -> Iterator[tuple[str, object]]:
    """Yield the single values in nested JSON, each with its key; with one above it where that names implementations."""
    left = [("", config)]
    while left:
        key, value = left.pop()
        if isinstance(value, Mapping):
            named = key.lstrip("_") in _IMPLEMENTATIONS
            left += [(key if named else str(name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(key, inner) for inner in value]
        else:
            yield key, value
