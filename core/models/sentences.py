"""Read the settings of an encoder of sentences in the files of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from opgraft.errors import CheckpointError
from opgraft.models.files import (
    MODULES,
    SENTENCE_CONFIG,
    Weights,
    read_json,
    sentence_modules,
)
from opgraft.models.pooling import pooling_modes
from opgraft.models.settings_keys import (
    CONFIG_SENTENCE_TRANSFORMERS,
    CROSS_ENCODER_CONFIG,
    CROSS_ENCODER_TRANSFORMER,
    NORMALIZE_CONFIG,
    SENTENCE_BERT_CONFIG,
    SettingsKey,
    refusals,
)

_KINDS = ("Transformer", "Pooling", "Normalize")
_NO_LIMIT = 10**9
"""Numbers from here on are no limit. Transformers writes 10**30 for a tokenizer without a limit."""

_TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files with the settings of the model. The first file counts. Older versions have other names."""

_USUAL_POOLING = ("mean",)
"""The mode without a list of modules. sentence-transformers reads no settings of pooling then."""

_USUAL_PROMPTS = {"query": "", "document": ""}
_OF_TOKENIZER = ("processor_kwargs", "tokenizer_args")
_KNOWN_ARGUMENTS = {"model_max_length", "padding_side", "use_fast", "trust_remote_code"}
"""Arguments of a tokenizer. Only the first one changes a vector."""


class _Tables(NamedTuple):
    """The known settings of the module ``Transformer``, and of the whole model."""

    transformer: Sequence[SettingsKey]
    general: Sequence[SettingsKey]


_ENCODER = _Tables(SENTENCE_BERT_CONFIG, CONFIG_SENTENCE_TRANSFORMERS)
_CROSS_ENCODER = _Tables(CROSS_ENCODER_TRANSFORMER, CROSS_ENCODER_CONFIG)


@dataclass(frozen=True)
class SentenceSettings:
    """The settings for making tokens from a text, and one vector from the states of the tokens.

    Attributes:
        pooling: names in ``opgraft.models.pooling.POOLINGS``.
        normalize: make vectors of unit length. This is the default without a list of modules.
        max_tokens: tokens of a sentence at most; ``None`` if the checkpoint has no limit.
        lower_case: put texts in lower case.
        prompt: a text before each text.
        size: the length of the returned vector; ``None`` for the whole vector.
    """

    pooling: tuple[str, ...]
    normalize: bool
    max_tokens: int | None
    lower_case: bool = False
    prompt: str = ""
    size: int | None = None

    @classmethod
    def of(cls, weights: Weights, *, has_labels: bool = False) -> SentenceSettings:
        """Read the settings of a checkpoint.

        Args:
            weights: the checkpoint.
            has_labels: the model gives scores of labels in place of vectors.

        Raises:
            CheckpointError: the settings cannot be read, or have a value that is not known.
        """
        folder = weights.path if weights.path.is_dir() else weights.path.parent
        outer = weights.outer or folder
        general_file = outer / SENTENCE_CONFIG
        pooling: tuple[str, ...] = _USUAL_POOLING
        normalize = True
        given: Mapping[str, Any] = {}
        general: Mapping[str, Any] = {}
        # sentence-transformers reads its files only if there is a list of modules.
        listed = (outer / MODULES).is_file()
        if listed:
            keys = _CROSS_ENCODER if has_labels else _ENCODER
            given = _transformer_settings(folder, keys.transformer)
            general = _settings_of_module(general_file, keys.general)
        prompt = _prompt(general_file, general)
        # A model with labels has a head of its own, and pools nothing.
        if has_labels:
            _expect_transformer_alone(outer)
        elif listed:
            pooling_folder, normalize = _steps(outer)
            pooling = _pooling(outer / pooling_folder / "config.json", prompt)
        return cls(
            pooling=pooling,
            normalize=normalize,
            max_tokens=_max_tokens(folder, given),
            lower_case=bool(given.get("do_lower_case")),
            prompt=prompt,
            size=_size(general_file, general),
        )


def _expect_transformer_alone(outer: Path) -> None:
    """Check that sentence-transformers applies nothing to the scores of a cross-encoder.

    Raises:
        CheckpointError: the list of modules has further modules.
    """
    kinds = [row["type"] for row in sentence_modules(outer)]
    if kinds not in ([], ["Transformer"]):
        raise CheckpointError(
            f"{outer / MODULES} lists {', '.join(kinds)!r:.80}, and a model with labels is a "
            "Transformer alone here: use sentence-transformers"
        )


def _steps(outer: Path) -> tuple[str, bool]:
    """Return the folder of the pooling, and True if a later module makes vectors of unit length.

    sentence-transformers applies the modules in the order of the list. A ``Normalize`` before the
    pooling finds no vector and changes nothing.

    Raises:
        CheckpointError: the list has a module that opgraft does not know, or the order gives no
            vector.
    """
    file = outer / MODULES
    rows = sentence_modules(outer)
    kinds = [row["type"] for row in rows]
    for kind in kinds:
        if kind not in _KINDS:
            raise CheckpointError(
                f"{file} lists a module {kind!r:.80}, which cannot be applied: use "
                "sentence-transformers, or graft the model in a program of your own"
            )
    # Vectors of unit length may be asked for at several places.
    others = [kind for kind in kinds if kind != "Normalize"]
    if others != ["Transformer", "Pooling"] or kinds[0] != "Transformer":
        raise CheckpointError(
            f"{file} lists {', '.join(kinds) or 'no module'}, expected a Transformer first, "
            "then one Pooling: use sentence-transformers, or correct the list"
        )
    pooling = kinds.index("Pooling")
    normalizes = False
    for place, row in enumerate(rows):
        if row["type"] == "Normalize":
            _settings_of_module(outer / row["path"] / "config.json", NORMALIZE_CONFIG)
            normalizes = normalizes or place > pooling
    return rows[pooling]["path"], normalizes


def _settings_of_module(file: Path, keys: Sequence[SettingsKey]) -> dict[str, Any]:
    """Return the settings in a file; none without a file.

    Raises:
        CheckpointError: the file cannot be read, or has settings that are refused.
    """
    found = read_json(file) if file.is_file() else {}
    problems = refusals(keys, found)
    if problems:
        raise CheckpointError.listing(
            f"{file} has settings that are not read here, and vectors would differ without them",
            problems,
            "use sentence-transformers, or take them out if you know that they change nothing",
        )
    return found


def _transformer_settings(folder: Path, keys: Sequence[SettingsKey]) -> dict[str, Any]:
    """Return the settings of the module ``Transformer``."""
    present = [name for name in _TRANSFORMER_FILES if (folder / name).is_file()]
    file = folder / (present[0] if present else _TRANSFORMER_FILES[0])
    found = _settings_of_module(file, keys)
    for name in _OF_TOKENIZER:
        unread = set(found.get(name) or {}) - _KNOWN_ARGUMENTS
        if unread:
            raise CheckpointError(
                f"{file}: {name} has {min(unread)!r:.80}, which is not read here: use "
                "sentence-transformers, or put it in tokenizer_config.json"
            )
    return found


def _prompt(file: Path, general: Mapping[str, Any]) -> str:
    """Return the default prompt, which sentence-transformers puts before a text."""
    name = general.get("default_prompt_name")
    # sentence-transformers adds the usual ones, so that a checkpoint need not list them.
    prompts = {**_USUAL_PROMPTS, **(general.get("prompts") or {})}
    if name is None:
        return ""
    if name not in prompts or not isinstance(prompts[name], str | None):
        raise CheckpointError(
            f"{file}: default_prompt_name is {name!r:.80}, and prompts has no text of that name"
        )
    return prompts[name] or ""


def _size(file: Path, general: Mapping[str, Any]) -> int | None:
    """Return the length of the returned vector; ``None`` for the whole vector."""
    size = general.get("truncate_dim")
    if size is not None and (type(size) is not int or size < 1):
        raise CheckpointError(f"{file}: truncate_dim is {size!r:.80}, expected a number from 1")
    return size


def _pooling(file: Path, prompt: str) -> tuple[str, ...]:
    """Return the modes of pooling.

    Args:
        file: the settings of the module ``Pooling``, whose folder the list of modules names.
        prompt: the default prompt.
    """
    if not file.is_file():
        raise CheckpointError(
            f"{file} is missing, and {MODULES} names its folder: download the checkpoint again"
        )
    settings = read_json(file)
    # Such models were trained without the states of the prompt.
    if prompt and settings.get("include_prompt") is False:
        raise CheckpointError(
            f"{file}: include_prompt is false, and the default prompt {prompt!r:.80} would be "
            "pooled: use sentence-transformers, or take default_prompt_name out"
        )
    try:
        return pooling_modes(settings)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _max_tokens(folder: Path, given: Mapping[str, Any]) -> int | None:
    """Return the limit of a sentence in tokens; ``None`` without a limit.

    The first setting with a limit counts, in the order of sentence-transformers.
    """
    file = folder / "tokenizer_config.json"
    tokenizer = read_json(file) if file.is_file() else {}
    arguments = [(given.get(name) or {}).get("model_max_length") for name in _OF_TOKENIZER]
    stated = [*arguments, given.get("max_seq_length")]
    stated += [tokenizer.get(name) for name in ("model_max_length", "max_len")]
    for limit in stated:
        # A missing setting, or null, is no limit.
        if type(limit) is int and limit > 0:
            return None if limit >= _NO_LIMIT else limit
    return None
