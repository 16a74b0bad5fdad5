"""The steps of a ``tokenizers.Tokenizer``, compared with those that a class of transformers makes.

Such a class takes the vocabulary of ``tokenizer.json`` and makes all other steps anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from opgraft.models.extras import import_extra

_BY_SETTINGS = ("lowercase", "add_prefix_space", "prepend_scheme", "trim_offsets")
"""Fields that are compared with the settings of a checkpoint, or that change no id."""

_OF_MODEL = (
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)
_INNER = ("normalizers", "pretokenizers", "decoders")
"""Names under which a sequence has its parts."""

_CHARACTERS = "Precompiled"
_TEXT = "\0text"


def parts_of(backend: Any, *, without_characters: bool) -> str:
    """Return a digest of the steps of a tokenizer, the vocabulary left out.

    Args:
        backend: the ``tokenizers.Tokenizer``.
        without_characters: leave out the table of characters that ``tokenizer.json`` may have. A
            class that takes the table from the file keeps the step.
    """
    stages: list[Any] = [_model(backend)]
    for stage in (backend.normalizer, backend.pre_tokenizer, backend.decoder):
        rows = _steps_of_stage(stage)
        if without_characters:
            rows = [row for row in rows if row["type"] != _CHARACTERS]
        stages.append(rows)
    text = json.dumps(stages, sort_keys=True)
    digest = hashlib.sha256(text.encode())
    return digest.hexdigest()[:16]


def _steps_of_stage(stage: Any) -> list[dict[str, Any]]:
    """Return the steps of a stage, as ``tokenizer.json`` has them; none for no stage."""
    if stage is None:
        return []
    whole = json.loads(stage.__getstate__())
    return list(_single(whole))


def _model(backend: Any) -> dict[str, Any]:
    """Return the settings of the model. A setting that is false or empty is left out."""
    model = backend.model
    found = {"type": type(model).__name__}
    for name in _OF_MODEL:  # a kind of model has some of them
        value = getattr(model, name, None)
        if value:
            found[name] = value
    return found


def _single(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a sequence one by one, without the fields that settings decide on."""
    for name in _INNER:
        if name not in part:
            continue
        for inner in part[name]:
            yield from _single(inner)
        return
    kept = part.keys() - {*_BY_SETTINGS}
    yield {name: part[name] for name in kept}


def tokens_around(backend: Any) -> list[list[str]]:
    """Return the tokens that a tokenizer puts before a text, and those behind a text."""
    if backend.post_processor is None:
        return [[], []]
    library = import_extra("tokenizers")
    # A vocabulary of one word: any text would do, and its token is found again in the result.
    model = library.models.WordLevel({_TEXT: 0}, unk_token=_TEXT)
    encoding = library.Tokenizer(model).encode(_TEXT)
    tokens = backend.post_processor.process(encoding).tokens
    place = tokens.index(_TEXT)
    return [tokens[:place], tokens[place + 1 :]]
