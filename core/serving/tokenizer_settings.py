"""Settings beside a ``tokenizer.json``, applied to the tokenizer of that file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from opgraft.models.extras import import_extra
from opgraft.models.files import read_json
from opgraft.models.settings_keys import SHAPING
from opgraft.serving.tokenizer_parts import parts_of, tokens_around

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MORE_TOKENS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CLEANED = {
    " .": ".",
    " ?": "?",
    " !": "!",
    " ,": ",",
    " ' ": "'",
    " n't": "n't",
    " 'm": "'m",
    " 's": "'s",
    " 've": "'ve",
    " 're": "'re",
}
"""Replacements that clean an answer, in this order, if ``clean_up_tokenization_spaces`` is set."""

_OF_BERT = {"tokenize_chinese_chars": "handle_chinese_chars", "clean_text": "clean_text"}
"""Settings that the normalizer of BERT has, by their names there."""

_EVEN_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder's tokenizer.

    Files of older versions count if ``tokenizer_config.json`` has no ``added_tokens_decoder``, as
    in transformers.

    Raises:
        CheckpointError: a file is damaged.
    """
    settings = _read_if_there(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    special = _read_if_there(folder / "special_tokens_map.json")
    more = [*_more(settings), *(special.pop("extra_special_tokens", None) or ())]
    found = {**settings, **special}
    by_name = settings.get("extra_special_tokens")
    if more and not (by_name and isinstance(by_name, Mapping)):
        found["extra_special_tokens"] = more
    added = _read_if_there(folder / "added_tokens.json")
    if added:
        found["added_tokens"] = added
    return found


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def needs_transformers(backend: Any, settings: Mapping[str, Any], steps: Mapping[str, Any]) -> bool:
    """Return True if settings contradict ``tokenizer.json``, or their class makes other steps.

    A class of transformers may then make another tokenizer, and only transformers knows the class.

    Args:
        backend: the ``tokenizers.Tokenizer`` of ``tokenizer.json``.
        settings: of the tokenizer.
        steps: the row of ``steps_of_class``.
    """
    usual = steps.get("defaults", {})
    for name in SHAPING:
        value = settings.get(name, usual.get(name))
        if value is not None and _differs(backend, name, value):
            return True
    return _has_other_steps(backend, settings, steps) or _has_other_tokens(backend, settings)


def _has_other_steps(backend: Any, settings: Mapping[str, Any], steps: Mapping[str, Any]) -> bool:
    """Return True if the class makes other steps than ``tokenizer.json`` has.

    The tokens around a text are one of the steps.
    """
    if "parts" in steps:
        takes_characters = steps.get("characters", False)
        found = parts_of(backend, without_characters=takes_characters)
        if found != steps["parts"] or _has_other_scheme(backend, steps):
            return True
    if "around" not in steps:
        return False
    named = _named_tokens(settings)
    expected = []
    for names in steps["around"]:
        tokens = [_text_of_token(named.get(name)) for name in names]
        expected.append(tokens)
    return tokens_around(backend) != expected


def _has_other_scheme(backend: Any, steps: Mapping[str, Any]) -> bool:
    """Return True if the class puts a space before other pieces of a text, such as each one.

    If the class has settings for that, these are compared instead.
    """
    return "scheme" in steps and scheme_of(backend) not in (None, "never", steps["scheme"])


def _has_other_tokens(backend: Any, settings: Mapping[str, Any]) -> bool:
    """Return True if settings contradict ``tokenizer.json`` in special tokens.

    These are the tokens around a text, and the token for unknown words.
    """
    named = {name: _text_of_token(value) for name, value in _named_tokens(settings).items()}
    around = _tokens_around(backend)
    ends = [named[name] for name in ("cls_token", "sep_token") if name in named]
    # Without tokens around texts, the file says nothing that settings could contradict.
    if around and not around.issuperset(ends):
        return True
    unknown = getattr(backend.model, "unk_token", None)
    return unknown is not None and named.get("unk_token", unknown) != unknown


def _tokens_around(backend: Any) -> set[str]:
    """Return the tokens that the post-processor puts around a text."""
    if backend.post_processor is None:
        return set()
    tokens: set[str] = set()
    left = [json.loads(backend.post_processor.__getstate__())]
    while left:
        part = left.pop()
        left += part.get("processors", [])
        tokens.update(part.get("special_tokens", {}))
        tokens.update(part[name][0] for name in ("cls", "sep") if name in part)
    return tokens


def _differs(backend: Any, name: str, value: Any) -> bool:
    """Return True if ``tokenizer.json`` has another value, or no place for the setting."""
    parts = list(_components(backend))
    asked = bool(value)
    if name == "add_prefix_space":
        return asked != _prefixes(parts)
    if name == "legacy":
        scheme = "always" if asked else "first"
        return _scheme(parts) not in (None, scheme)
    if name == "do_lower_case":
        return asked != lowers(backend)
    if name == "strip_accents":
        # For BERT there is a third value, None: strip accents if texts become lower case.
        known = _values(parts, name) or [_has(parts, name, "StripAccents")]
        return value not in known
    if name in _OF_BERT:
        return asked not in _values(parts, _OF_BERT[name])
    return asked


def _values(parts: list[dict[str, Any]], field: str) -> list[Any]:
    """Return the values of a field of the parts that have it."""
    values = []
    for part in parts:
        if field in part:
            values.append(part[field])
    return values


def lowers(backend: Any) -> bool:
    """Return True if a ``tokenizers.Tokenizer`` puts texts in lower case."""
    return _has(list(_components(backend)), "lowercase", "Lowercase")


def is_of_bytes(backend: Any) -> bool:
    """Return True if a ``tokenizers.Tokenizer`` takes texts apart into bytes."""
    return any(part.get("type") == "ByteLevel" for part in _components(backend))


def _has(parts: list[dict[str, Any]], field: str, kind: str) -> bool:
    return any(part.get(field) or part.get("type") == kind for part in parts)


def _prefixes(parts: list[dict[str, Any]]) -> bool:
    """Return True if a space is put before a text."""
    for part in parts:
        if part.get("type") == "ByteLevel" and part.get("add_prefix_space"):
            return True
    return _scheme(parts) in ("always", "first", "each")


def _scheme(parts: list[dict[str, Any]]) -> str | None:
    """Return the pieces of a text with a space before them: ``each``, ``first`` and so on.

    These are the values of ``prepend_scheme``; None without such a step.
    """
    for part in parts:
        if part.get("type") == "Metaspace":
            return str(part.get("prepend_scheme"))
        if part.get("type") == "Prepend":
            return "each"
    return None


def scheme_of(backend: Any) -> str | None:
    """Return the pieces of a text that a ``tokenizers.Tokenizer`` puts a space before."""
    return _scheme(list(_components(backend)))


def _components(backend: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of the normalizer and the pre-tokenizer, in the form of the file."""
    stages = (backend.normalizer, backend.pre_tokenizer)
    left = [json.loads(stage.__getstate__()) for stage in stages if stage is not None]
    while left:
        part = left.pop(0)
        yield part
        # A sequence has its parts under one of two names.
        inner = part.get("normalizers") or part.get("pretokenizers") or []
        left = inner + left


def padding_token(backend: Any, steps: Mapping[str, Any]) -> dict[str, str]:
    """Return the ``pad_token`` for settings without one: the token of ``tokenizer.json``.

    A class that makes the steps anew leaves this token out.
    """
    padding = backend.padding
    if padding is None or "parts" in steps:
        return {}
    return {"pad_token": padding["pad_token"]}


def add_tokens(backend: Any, settings: Mapping[str, Any]) -> dict[str, str]:
    """Add the tokens of the settings to a ``tokenizers.Tokenizer``.

    Order and flags are those of transformers.

    Returns:
        The special tokens with a name, as text.
    """
    named = _named_tokens(settings)
    more = _more(settings)
    special = {_text_of_token(value) for value in named.values()}
    tokens = _listed(backend, settings)
    # A token with a name is special, even if the list says otherwise.
    for token in tokens:
        token.special = token.special or token.content in special
    there = backend.get_added_tokens_decoder().values()
    known = {token.content for token in (*there, *tokens)}
    values: list[Any] = []
    for value in (*named.values(), *more):
        if value in values:
            continue
        content = _text_of_token(value)
        if content not in known:
            values.append(value)
    for value in values:
        # A token without a name may have flags, and one of the flags makes the token special.
        content = _text_of_token(value)
        is_special = None
        if content in special or not isinstance(value, Mapping):
            is_special = True
        token = _token(value, is_special)
        tokens.append(token)
    backend.add_tokens(tokens)
    return {name: _text_of_token(value) for name, value in named.items()}


def _listed(backend: Any, settings: Mapping[str, Any]) -> list[Any]:
    """Return the added tokens with a listed id, in the order of the ids."""
    if "added_tokens_decoder" in settings:
        rows = settings["added_tokens_decoder"]
        return [_token(rows[number]) for number in sorted(rows, key=int)]
    # "additional_special_tokens" of an older file do not make a token special, as in transformers.
    extra = settings.get("extra_special_tokens")
    given = list(_named_tokens(settings).values())
    given += extra if isinstance(extra, list) else []
    special = {_text_of_token(value) for value in given}
    found = {}
    for text, number in settings.get("added_tokens", {}).items():
        is_special = text in special
        row = {"content": text, "normalized": not is_special}
        found[int(number)] = _token(row, is_special)
    found |= backend.get_added_tokens_decoder()
    return [found[number] for number in sorted(found)]


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens with a name: the usual ones, then the model's own."""
    usual = {}
    for name in _NAMED:
        if settings.get(name) is not None:
            usual[name] = settings[name]
    flagged = {}
    plain = {}
    for name, value in settings.items():
        if name in _NAMED or not name.endswith("_token"):
            continue
        if isinstance(value, Mapping):
            flagged[name] = value
        # Other values, such as of add_bos_token, are no tokens.
        elif isinstance(value, str):
            plain[name] = value
    extra = settings.get("extra_special_tokens")
    plain |= extra if isinstance(extra, Mapping) else {}
    own = plain or settings.get("model_specific_special_tokens") or {}
    return usual | flagged | own


def _more(settings: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens without a name."""
    for name in _MORE_TOKENS:
        found = settings.get(name)
        if found and isinstance(found, list):
            return found
    return []


def _text_of_token(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _token(value: Any, special: bool | None = None) -> Any:
    """Return a ``tokenizers.AddedToken`` of a text, or of a text with flags."""
    flags = {}
    if isinstance(value, Mapping):
        flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    if special is not None:
        flags["special"] = special
    added_token = import_extra("tokenizers").AddedToken
    return added_token(_text_of_token(value), **flags)


def clean_spaces(backend: Any, settings: Mapping[str, Any]) -> None:
    """Let a ``tokenizers.Tokenizer`` remove spaces before punctuation, if settings ask for this."""
    if not settings.get("clean_up_tokenization_spaces"):
        return
    tokenizers = import_extra("tokenizers")
    is_bpe = isinstance(backend.model, tokenizers.models.BPE)
    if is_bpe and not settings.get(_EVEN_BPE):
        return
    parts = tokenizers.decoders
    # Without a decoder, the library puts spaces between tokens.
    joined = backend.decoder or parts.WordPiece(prefix="\0", cleanup=False)
    steps = [joined, parts.Fuse()]
    for pair in _CLEANED.items():
        steps.append(parts.Replace(*pair))
    backend.decoder = parts.Sequence(steps)
