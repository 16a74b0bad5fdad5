"""Read the configuration and the tokenizer of a checkpoint from local files, running no code."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from opgraft.base.text import described
from opgraft.errors import CheckpointError
from opgraft.models.extras import import_extra
from opgraft.models.files import SENTENCE_CONFIG, Weights, read_json, sentence_modules
from opgraft.models.gguf_names import config_values
from opgraft.models.plain_config import own_config, plain_config

LOCAL_ONLY: Mapping[str, Any] = MappingProxyType(
    {"local_files_only": True, "trust_remote_code": False}
)
"""Arguments that keep transformers from asking a hub and from running code of a checkpoint."""

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_LAYERS = 4096
_GENERATES = re.compile(r"(ForCausalLM|LMHeadModel)$")
_IMPLEMENTATIONS = frozenset(
    f"{part}_implementation{end}" for part in ("attn", "experts") for end in ("", "_internal")
)
_LOCAL = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""The implementations in transformers itself. Transformers may fetch others from a hub."""


def read_config(weights: Weights, *, plain: bool = False) -> Any:
    """Return the configuration of a checkpoint, mostly of transformers' class for ``model_type``.

    Args:
        weights: the checkpoint.
        plain: allow a ``PlainConfig``, which spares the import of transformers. Transformers still
            reads a config with unusual settings.

    Raises:
        CheckpointError: ``config.json`` is missing, is broken, needs Python code, or names an
            implementation of a hub. The architecture of a GGUF file is not known.
        InputError: transformers is not installed.
    """
    # The values are checked before transformers reads the file, as it may act on some of them.
    if weights.is_gguf:
        file = weights.path
        values = config_values(weights.metadata, weights.stored, file)
    else:
        file = folder_of(weights) / "config.json"
        values = check_config(file)
    _expect_plausible(values, file)
    found = own_config(values, file)
    if found is None and plain:
        found = plain_config(values)
    if found is None:
        found = _config_of_transformers(weights, values, file)
    if _embeds_sentences(weights):
        _take_base_model(found)
    _take_activation(found, weights)
    return found


def _config_of_transformers(weights: Weights, values: dict[str, Any], file: Path) -> Any:
    transformers = import_extra("transformers")
    try:
        if weights.is_gguf:
            # transformers reads only GGUF files of a few families. The values are known already.
            return transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        with _without_warnings(transformers):
            return transformers.AutoConfig.from_pretrained(file.parent, **LOCAL_ONLY)
    # Damaged values make transformers raise nearly anything.
    except Exception as error:
        version = f"transformers {transformers.__version__}"
        _refuse_code(file, error, version)
        _refuse_unknown(file, values.get("model_type"), transformers)
        raise CheckpointError(
            f"{version} cannot read the configuration in {file}: {described(error)}"
        ) from error


def _embeds_sentences(weights: Weights) -> bool:
    """Return True if sentence-transformers lists a pooling for the checkpoint."""
    outer = weights.outer or folder_of(weights)
    return any(row["type"] == "Pooling" for row in sentence_modules(outer))


def _take_base_model(config: Any) -> None:
    """Let a config name the base model in place of a model that generates text.

    sentence-transformers loads the base model, whatever the config names: Qwen3-Embedding names
    ``Qwen3ForCausalLM``.
    """
    named = config.architectures or ()
    if not any(_GENERATES.search(name) for name in named):
        return
    import_extra("transformers")
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    base = auto.MODEL_MAPPING_NAMES.get(config.model_type)
    # Some types have several base models, the usual one first.
    names = [base] if isinstance(base, str) else list(base or named)
    config.architectures = names[:1]


def _take_activation(config: Any, weights: Weights) -> None:
    """Let a config name the activation of a cross-encoder.

    sentence-transformers 6 writes the name beside the config, and former versions into the config.
    """
    file = (weights.outer or folder_of(weights)) / SENTENCE_CONFIG
    named = read_json(file).get("activation_fn") if file.is_file() else None
    if named is not None:
        config.sentence_transformers = {"activation_fn": named}


def _expect_plausible(values: Mapping[str, Any], file: Path) -> None:
    """Refuse an absurd number of layers, before anybody makes a list of the layers.

    Raises:
        CheckpointError: the config has such a number.
    """
    for key, value in _settings_of_config(values):
        if key in _LAYERS and isinstance(value, int) and value > _MOST_LAYERS:
            raise CheckpointError(
                f"{file}: {key} is {value!r:.40}, and no model has more than {_MOST_LAYERS:,} "
                "layers: download it again"
            )


@contextmanager
def _without_warnings(transformers: Any) -> Iterator[None]:
    """Silence warnings of transformers: errors say the same, or opgraft reads the setting."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def load_tokenizer(weights: Weights) -> Any:
    """Load the tokenizer of a checkpoint, with its chat template.

    Raises:
        CheckpointError: the checkpoint has no tokenizer, or transformers rejects the tokenizer.
        InputError: transformers is not installed.
    """
    transformers = import_extra("transformers")
    folder = folder_of(weights)
    place = {"gguf_file": weights.path.name} if weights.is_gguf else {}
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, **place, **LOCAL_ONLY)
    # Damaged files make transformers raise nearly anything.
    except Exception as error:
        version = f"transformers {transformers.__version__}"
        _refuse_code(folder / "tokenizer_config.json", error, version)
        raise CheckpointError(
            f"{version} cannot load the tokenizer of {weights.path}: {described(error)}"
        ) from error


def check_config(file: Path) -> dict[str, Any]:
    """Read a ``config.json`` and refuse settings that would run code of others.

    Raises:
        CheckpointError: the file is missing, is broken, or names an implementation that
            transformers may fetch from a hub.
    """
    if not file.is_file():
        raise CheckpointError(
            f"{file.parent} has no config.json: it is no Hugging Face checkpoint folder"
        )
    config = read_json(file)
    names = config.get("architectures")
    if names is not None:
        are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not are_names:
            raise CheckpointError(
                f"{file}: architectures is {names!r:.200}, expected a list of class names"
            )
    for key, value in _settings_of_config(config):
        # transformers reads the key without and with "_".
        if key.lstrip("_") in _IMPLEMENTATIONS and value not in _LOCAL:
            raise CheckpointError(
                f"{file}: {key} is {value!r:.80}, which is refused: transformers may take it from "
                f"a hub and run it. Remove it, or use one of {', '.join(map(repr, _LOCAL[1:]))}."
            )
    return config


def _refuse_code(file: Path, error: Exception, version: str) -> None:
    """Explain the error of transformers if the file names Python code, which may not run.

    Raises:
        CheckpointError: the file names code.
    """
    if not isinstance(error, ValueError) or file.suffix != ".json" or not file.is_file():
        return
    if "auto_map" in read_json(file):
        raise CheckpointError(
            f"{file} needs Python code of its own (auto_map), which is refused: it would run with "
            f"your rights. Use a checkpoint whose architecture {version} knows."
        ) from error


def _refuse_unknown(file: Path, kind: object, transformers: Any) -> None:
    """Refuse a ``model_type`` without a class.

    Raises:
        CheckpointError: neither transformers nor a plugin has registered a class.
    """
    if isinstance(kind, str) and kind not in transformers.CONFIG_MAPPING:
        version = f"transformers {transformers.__version__}"
        raise CheckpointError(
            f"{file}: model_type is {kind!r:.80}, which neither {version} nor an active plugin "
            "has. If a plugin brings the model, install it, or see why it is not active: opgraft "
            "plugins doctor"
        )


def folder_of(weights: Weights) -> Path:
    """Return the folder of a checkpoint, which may be a single file."""
    return weights.path if weights.path.is_dir() else weights.path.parent


def _settings_of_config(config: object) -> Iterator[tuple[str, object]]:
    """Yield each single value in nested JSON with its key.

    Implementations may be given for each part of a model: ``{"attn_implementation": {"text":
    "sdpa"}}``. The values of such an object are yielded with the outer key.
    """
    # A loop instead of a recursion: the file of a stranger may nest objects deeply.
    left = [("", config)]
    while left:
        key, value = left.pop()
        if isinstance(value, Mapping):
            if key.lstrip("_") in _IMPLEMENTATIONS:
                left += [(key, inner) for inner in value.values()]
            else:
                left += [(str(name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(key, inner) for inner in value]
        else:
            yield key, value
