"""Special tokens and steps of the classes of transformers, whatever ``tokenizer.json`` says.

``tokenizer_classes.json`` has a row for each class: tokens, model types and a digest of the steps.
``tools/record_tokenizer_classes.py`` writes the file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("tokenizer_classes.json")
_PLAIN = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizer", "MistralCommonBackend")
"""Classes that read ``tokenizer.json`` as it is."""

_LLAMA = "LlamaTokenizer"
_WITH_MORE = (
    "BlenderbotTokenizer",
    "CamembertTokenizer",
    "EsmcTokenizer",
    "LasrTokenizer",
    "MLukeTokenizer",
    "RemBertTokenizer",
    "SeamlessM4TTokenizer",
    "T5Tokenizer",
    "VideoPrismTokenizer",
    "XGLMTokenizer",
    "XLNetTokenizer",
)
"""Classes that add more than the tokens of their arguments. Saved settings list such tokens."""


def usual_tokens(
    settings: Mapping[str, Any], config: Mapping[str, Any], of_bytes: bool
) -> dict[str, str]:
    """Return the special tokens of the class of a tokenizer.

    Args:
        settings: of the tokenizer.
        config: the content of ``config.json``.
        of_bytes: the vocabulary is one of bytes.
    """
    name = _class_of(settings, config, of_bytes)
    if _stated(settings, config) is None and not settings and not _is_of_encoder(name):
        # Decoders without settings are read as they are: most have no such token in their files.
        return {}
    return _tokens_of(name)


def steps_of_class(
    settings: Mapping[str, Any], config: Mapping[str, Any], of_bytes: bool
) -> Mapping[str, Any]:
    """Return the row of the class of a tokenizer; empty if only ``tokenizer.json`` counts.

    ``defaults`` has settings, ``parts`` the digest of ``tokenizer_parts.parts_of``, and ``around``
    the names of the tokens before and behind a text. Each may be missing.
    """
    name = _class_of(settings, config, of_bytes)
    # Without any settings, all steps in tokenizer.json are meant.
    if _stated(settings, config) is None and not settings:
        return {}
    row: Mapping[str, Any] = _classes().get(name, {})
    return row


def _is_of_encoder(name: str) -> bool:
    return "mask_token" in _tokens_of(name)


def adds_more(settings: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return True if the class of a tokenizer adds tokens that are not in our table."""
    name = _class_of(settings, config, of_bytes=False)
    return name in _WITH_MORE and "added_tokens_decoder" not in settings


def _stated(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    return settings.get("tokenizer_class") or config.get("tokenizer_class")


def _class_of(settings: Mapping[str, Any], config: Mapping[str, Any], of_bytes: bool) -> str:
    """Return the name of the class in transformers, without "Fast"."""
    known, always = _by_kind()
    kind = config.get("model_type")
    registered = known.get(kind, "")
    stated = _stated(settings, config)
    if stated is None or kind in always:
        return registered
    name = str(stated).removesuffix("Fast")
    # Some checkpoints with a vocabulary of bytes name the class of Llama 2, which has none.
    if registered in _PLAIN or (name == _LLAMA and of_bytes):
        return _PLAIN[0]
    return name


def _tokens_of(name: str) -> dict[str, str]:
    tokens: dict[str, str] = _classes().get(name.removesuffix("Fast"), {}).get("tokens", {})
    return tokens


@functools.cache
def _classes() -> Mapping[str, Any]:
    classes: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return classes


@functools.cache
def _by_kind() -> tuple[dict[Any, str], frozenset[str]]:
    """Return the classes by model type, and the types with this class in any case."""
    known: dict[Any, str] = {}
    always: set[str] = set()
    for name, row in _classes().items():
        known.update(dict.fromkeys(row["kinds"], name.removesuffix("Fast")))
        always.update(row["always"])
    return known, frozenset(always)
