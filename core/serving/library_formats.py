"""``library_format``: the format of chats that a library of the model's makers writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from opgraft.base.log import logger
from opgraft.config.sections import ModelConfig
from opgraft.errors import ConfigError, InputError
from opgraft.serving import harmony, mistral
from opgraft.serving.chat_format import ChatFormat
from opgraft.serving.tokenizer import Tokenizer

_SETTING = "model.chat_format"
_FOLDER = "model.vocabulary_folder"


@dataclass(frozen=True)
class _Library:
    """A library that writes the chats of a family of models.

    Attributes:
        family: the models, in words.
        file: of the vocabulary, in words.
        find: returns the vocabulary in a folder, or None.
        is_for: True for the tokenizer and the folder of a checkpoint of the family.
        open: makes the format with a vocabulary.
    """

    family: str
    file: str
    find: Callable[[Path], Path | None]
    is_for: Callable[[Tokenizer | None, Path], bool]
    open: Callable[[Path], ChatFormat]


def _harmony_vocabulary(folder: Path) -> Path | None:
    file = folder / harmony.VOCABULARY
    return file if file.is_file() else None


def _has_tokens_of_harmony(tokenizer: Tokenizer | None, folder: Path) -> bool:
    if tokenizer is None:
        return False
    found = tokenizer.special_tokens_by_text()
    return all(found.get(text) == token for text, token in harmony.MARKERS.items())


def _has_vocabulary_of_mistral(tokenizer: Tokenizer | None, folder: Path) -> bool:
    return mistral.vocabulary_in(folder) is not None


LIBRARIES: Mapping[str, _Library] = MappingProxyType(
    {
        "harmony": _Library(
            "gpt-oss",
            harmony.VOCABULARY,
            _harmony_vocabulary,
            _has_tokens_of_harmony,
            harmony.HarmonyFormat,
        ),
        "mistral": _Library(
            "Mistral's models",
            f"{mistral.TEKKEN} or tokenizer.model.v3",
            mistral.vocabulary_in,
            _has_vocabulary_of_mistral,
            mistral.MistralFormat,
        ),
    }
)
"""Libraries by the value of ``model.chat_format``."""


def library_format(
    model: ModelConfig, folder: Path, tokenizer: Tokenizer | None
) -> ChatFormat | None:
    """Return the format of a library, or None if the chat template writes the chats.

    Args:
        model: the settings ``chat_format``, ``vocabulary_folder`` and ``chat_template``.
        folder: of the checkpoint.
        tokenizer: of the checkpoint, None if there is none.

    Raises:
        ConfigError: the settings ask for a format, and the library or its vocabulary is missing, or
            the checkpoint is of another family.
    """
    if model.chat_format == "template":
        return None
    if model.chat_format != "auto":
        return _of_setting(model, folder, tokenizer)
    # The operator has chosen how chats are written.
    if model.chat_template is not None:
        return None
    for name, library in LIBRARIES.items():
        if library.is_for(tokenizer, folder):
            return _of_family(name, library, model, folder, tokenizer)
    return None


def _of_setting(model: ModelConfig, folder: Path, tokenizer: Tokenizer | None) -> ChatFormat:
    """Return the format that ``model.chat_format`` names."""
    name = model.chat_format
    library = LIBRARIES[name]
    if model.chat_template is not None:
        raise ConfigError(
            f"{_SETTING} is {name}, and model.chat_template names a template for the same chats: "
            "leave one of the two out"
        )
    return _opened(name, library, model, folder, tokenizer)


def _of_family(
    name: str, library: _Library, model: ModelConfig, folder: Path, tokenizer: Tokenizer | None
) -> ChatFormat | None:
    """Return the format of a checkpoint's family, or None with a warning."""
    try:
        return _opened(name, library, model, folder, tokenizer)
    except ConfigError as error:
        # The operator has asked for the vocabulary of this folder.
        if model.vocabulary_folder is not None:
            raise
        logger.warning(
            "%s. Until then, the checkpoint's chat template is used, and answers may show markers. "
            "%s=template leaves this warning out.",
            str(error).rstrip("."),
            _SETTING,
        )
        return None


def _opened(
    name: str, library: _Library, model: ModelConfig, folder: Path, tokenizer: Tokenizer | None
) -> ChatFormat:
    place = folder if model.vocabulary_folder is None else Path(model.vocabulary_folder)
    file = library.find(place)
    if file is None:
        raise ConfigError(
            f"chats of {library.family} ({_SETTING} {name}) need the vocabulary {library.file}, "
            f"and {place} has none: set {_FOLDER} to the folder of the file"
        )
    try:
        found = library.open(file)
    except InputError as error:
        raise ConfigError(f"chats of {library.family} ({_SETTING} {name}): {error}") from error
    if tokenizer is not None:
        _expect_same_tokens(name, file, found, tokenizer)
    return found


def _expect_same_tokens(name: str, file: Path, found: ChatFormat, tokenizer: Tokenizer) -> None:
    """Check that a vocabulary and the tokenizer of a checkpoint have the same special tokens."""
    known = tokenizer.special_tokens_by_text()
    # With other ids, the model would read markers as ordinary words, and answer nonsense.
    for text, token in found.special_tokens.items():
        if known.get(text) != token:
            raise ConfigError(
                f"{_SETTING} is {name}, and the tokenizer in {tokenizer.path} has other special "
                f"tokens than {file}, in which {text} is {token}: set {_SETTING} to template, or "
                f"{_FOLDER} to the folder of this model's vocabulary"
            )
