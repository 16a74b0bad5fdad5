"""What the settings beside a ``tokenizer.json`` change in the tokenizer that it describes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from opgraft.models.extras import import_extra
from opgraft.models.files import read_json
from opgraft.models.settings_keys import SHAPING

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
"""What an answer is cleaned of, in this order, if ``clean_up_tokenization_spaces`` is set."""

_OF_BERT = {"tokenize_chinese_chars": "handle_chinese_chars", "clean_text": "clean_text"}
"""Settings that the normalizer of BERT has, by their names there."""

_EVEN_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder's tokenizer.

    Files of older versions count if ``tokenizer_config.json`` has no ``added_tokens_decoder``, as in transformers.

    Raises:
        CheckpointError: a file is damaged.
    """
    settings = _read(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    special = _read(folder / "special_tokens_map.json")
    more = [*_more(settings), *(special.pop("extra_special_tokens", None) or ())]
    extra = {"extra_special_tokens": more} if more else {}
    return {**settings, **special, **extra, "added_tokens": _read(folder / "added_tokens.json")}


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def needs_transformers(backend: Any, settings: Mapping[str, Any]) -> bool:
    """Tell whether settings ask for something else than ``tokenizer.json`` says.

    A class of transformers may then make another tokenizer; transformers knows which class that is.
    """
    return any(
        _differs(backend, name, settings[name])
        for name in SHAPING
        if settings.get(name) is not None
    )


def _differs(backend: Any, name: str, value: Any) -> bool:
    """Tell whether a setting is another than the one in ``tokenizer.json``; so for all that it has no place for."""
    parts = list(_components(backend))
    if name == "add_prefix_space":
        return bool(value) != _prefixes(parts)
    if name == "legacy":
        return _scheme(parts) not in (None, "always" if value else "first")
    if name == "do_lower_case":
        return bool(value) != lowers(backend)
    if name == "strip_accents":
        known = [part["strip_accents"] for part in parts if "strip_accents" in part]
        return value not in (known or [_has(parts, "strip_accents", "StripAccents")])
    if name in _OF_BERT:
        known = [part[_OF_BERT[name]] for part in parts if _OF_BERT[name] in part]
        return bool(value) not in known
    return bool(value)


def lowers(backend: Any) -> bool:
    """Tell whether a ``tokenizers.Tokenizer`` puts texts in lower case."""
    return _has(list(_components(backend)), "lowercase", "Lowercase")


def _has(parts: list[dict[str, Any]], field: str, kind: str) -> bool:
    return any(part.get(field) or part.get("type") == kind for part in parts)


def _prefixes(parts: list[dict[str, Any]]) -> bool:
    """Tell whether a space is put before a text."""
    in_bytes = [part for part in parts if part.get("type") == "ByteLevel"]
    return any(part.get("add_prefix_space") for part in in_bytes) or _scheme(parts) in (
        "always",
        "first",
        "each",
    )


def _scheme(parts: list[dict[str, Any]]) -> str | None:
    """Return where a character for a space is put: before each piece of a text, the first, or never."""
    for part in parts:
        if part.get("type") == "Metaspace":
            return str(part.get("prepend_scheme"))
        if part.get("type") == "Prepend":
            return "each"
    return None


def _components(backend: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of the normalizer and the pre-tokenizer, each as ``tokenizer.json`` has it."""
    left = [json.loads(part.__getstate__()) for part in _stages(backend) if part is not None]
    while left:
        part = left.pop(0)
        yield part
        left = [*part.get("normalizers", ()), *part.get("pretokenizers", ()), *left]


def _stages(backend: Any) -> tuple[Any, Any]:
    return backend.normalizer, backend.pre_tokenizer


def add_tokens(backend: Any, settings: Mapping[str, Any]) -> dict[str, str]:
    """Add the tokens of the settings to a ``tokenizers.Tokenizer``, in the order and with the flags of transformers.

    Returns:
        The special tokens that have a name, as text.
    """
    named, more = _named(settings), _more(settings)
    special = {_content(value) for value in named.values()}
    tokens = _listed(backend, settings)
    for token in tokens:
        token.special = token.special or token.content in special
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known.update(token.content for token in tokens)
    for value in (*named.values(), *more):
        if (content := _content(value)) not in known:
            known.add(content)
            tokens.append(_token(value, special=True))
    backend.add_tokens(tokens)
    return {name: _content(value) for name, value in named.items()}


def _listed(backend: Any, settings: Mapping[str, Any]) -> list[Any]:
    """Return the added tokens that are listed with their ids, in the order of the ids."""
    if "added_tokens_decoder" in settings:
        rows = settings["added_tokens_decoder"].items()
        return [_token(row) for _, row in sorted(rows, key=lambda row: int(row[0]))]
    extra = settings.get("extra_special_tokens")
    given = (*_named(settings).values(), *(extra if isinstance(extra, list) else ()))
    special = {_content(value) for value in given}
    older = {
        int(number): _token({"content": text, "normalized": text not in special}, text in special)
        for text, number in settings.get("added_tokens", {}).items()
    }
    found = older | backend.get_added_tokens_decoder()
    return [found[number] for number in sorted(found)]


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens that have a name: the usual ones, then the model's own."""
    usual = {name: settings[name] for name in _NAMED if settings.get(name) is not None}
    own = {
        name: value
        for name, value in settings.items()
        if name.endswith("_token") and name not in _NAMED
    }
    flagged = {name: value for name, value in own.items() if isinstance(value, Mapping)}
    plain = {name: value for name, value in own.items() if isinstance(value, str)}
    extra = settings.get("extra_special_tokens")
    plain |= extra if isinstance(extra, Mapping) else {}
    return usual | flagged | (plain or settings.get("model_specific_special_tokens") or {})


def _more(settings: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens without a name."""
    found = next((settings[name] for name in _MORE_TOKENS if settings.get(name)), [])
    return found if isinstance(found, list) else []


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _token(value: Any, special: bool | None = None) -> Any:
    """Return a ``tokenizers.AddedToken`` of a text, or of a text with flags."""
    given = value if isinstance(value, Mapping) else {}
    flags = {flag: given[flag] for flag in _FLAGS if flag in given}
    if special is not None:
        flags["special"] = special
    return import_extra("tokenizers").AddedToken(_content(value), **flags)


def clean_spaces(backend: Any, settings: Mapping[str, Any]) -> None:
    """Have a ``tokenizers.Tokenizer`` take spaces before punctuation out of answers, if the settings say so."""
    tokenizers = import_extra("tokenizers")
    is_bpe = isinstance(backend.model, tokenizers.models.BPE)
    if not settings.get("clean_up_tokenization_spaces") or (is_bpe and not settings.get(_EVEN_BPE)):
        return
    parts = tokenizers.decoders
    joined = backend.decoder or parts.WordPiece(prefix="\0", cleanup=False)
    replaced = [parts.Replace(*pair) for pair in _CLEANED.items()]
    backend.decoder = parts.Sequence([joined, parts.Fuse(), *replaced])
