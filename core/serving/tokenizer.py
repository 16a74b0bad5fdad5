"""The tokenizer of a checkpoint: the library, its special tokens, and its chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from opgraft.base.text import described
from opgraft.base.timeline import phase
from opgraft.errors import CheckpointError, RequestError
from opgraft.models.config import load_tokenizer
from opgraft.models.extras import import_extra
from opgraft.models.files import Weights, read_json
from opgraft.models.gguf_tokenizer import (
    NO_TOKENIZER,
    chat_templates,
    gguf_tokenizer,
    special_tokens,
)
from opgraft.models.settings_keys import TOKENIZER_CONFIG, refusals
from opgraft.serving.tokenizer_classes import adds_more, steps_of_class, usual_tokens
from opgraft.serving.tokenizer_settings import (
    add_tokens,
    clean_spaces,
    is_of_bytes,
    lowers,
    needs_transformers,
    padding_token,
    read_settings,
)

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_TEKKEN_TOKENS = MappingProxyType(
    {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
)
"""Special tokens of every ``tekken.json``, which has no names for them."""

_LONG = 4096
"""Characters or ids of a long text.

For long texts the library's functions for several texts are called, because other threads can run
beside them.
"""


_BROKEN = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = tuple(byte for byte in range(256) if byte not in _VISIBLE)
_BYTE_LEVEL = {chr(byte): byte for byte in _VISIBLE} | {
    chr(256 + number): byte for number, byte in enumerate(_HIDDEN)
}
"""Bytes by their characters in a vocabulary of byte-level BPE, as GPT-2 introduced it."""


@dataclass(frozen=True)
class Tokenizer:
    """The text of token ids, and the token ids of text.

    Attributes:
        path: folder or file of the checkpoint.
        backend: the ``tokenizers.Tokenizer``.
        special_tokens: such as ``bos_token``, by their names in transformers, as text.
        chat_templates: by name; a single one is ``default``.
        truncation_side: the end to cut off from a long text, "right" or "left".
        template_file: the file of the chat template; None for the checkpoint's templates.
    """

    path: Path
    backend: Any = field(repr=False)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict, repr=False)
    truncation_side: str = "right"
    template_file: str | None = None

    @property
    def vocab_size(self) -> int:
        """The number of tokens, with those added to the vocabulary."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text, if there is one."""
        token = self.special_tokens.get("eos_token")
        return None if token is None else self.backend.token_to_id(token)

    def special_tokens_by_text(self) -> dict[str, int]:
        """Return the ids of all special tokens by their texts."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: int(number) for number, token in added.items() if token.special}

    def special_token(self, text: str) -> int | None:
        """Return the id of a special token by its text; None for other texts."""
        return self.special_tokens_by_text().get(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with tokens at its beginning and end.

        Raises:
            RequestError: the text has a gap to fill.
        """
        return list(self._encoding(text, add_special_tokens).ids)

    @phase("tokenize")
    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        gap = self.special_tokens.get("fill_token")
        # CodeLlama's class in transformers would put the parts around the gap in another order.
        if gap and gap in text:
            raise RequestError(
                f"the text has {gap!r}, the gap between two parts of a code, which is not read "
                "here: give token ids, with the model's tokens before each part"
            )
        if len(text) < _LONG:
            return self.backend.encode(text, add_special_tokens=add_special_tokens)
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    @phase("tokenize")
    def encode_pair(
        self, first: str, second: str, most: int | None = None
    ) -> tuple[list[int], int]:
        """Return the token ids of a pair of texts, and the place where the type of tokens changes.

        The place is the length, if the tokenizer gives both texts one type.

        Args:
            first: a text, which is never cut.
            second: another text.
            most: the second text is cut, so that there are at most so many token ids.
        """
        encoding = self.backend.encode(first, second)
        if most is not None and len(encoding) > most:
            whole = self.backend.encode(first, add_special_tokens=False)
            # Beside an empty first text, so that the tokens have the type of a second one.
            end = self.backend.encode("", second, add_special_tokens=False)
            around = self.backend.num_special_tokens_to_add(is_pair=True)
            end.truncate(max(most - around - len(whole), 0))
            encoding = self.backend.post_process(whole, end)
        types = list(encoding.type_ids)
        place = types.index(1) if 1 in types else len(types)
        return list(encoding.ids), place

    def lower_case(self) -> None:
        """Put every text in lower case first, unless the tokenizer has such a step."""
        if lowers(self.backend):
            return
        normalizers = import_extra("tokenizers").normalizers
        former = self.backend.normalizer
        steps = [normalizers.Lowercase(), *([] if former is None else [former])]
        self.backend.normalizer = normalizers.Sequence(steps)

    def encode_truncated(self, text: str, most: int, *, side: str | None = None) -> list[int]:
        """Return the token ids of a text, begun and ended as usual, cut to at most ``most``.

        Args:
            text: of any length.
            most: the most token ids, with those at the beginning and end.
            side: the end to cut off, "right" or "left". None: ``truncation_side``.
        """
        encoding = self._encoding(text, add_special_tokens=False)
        # Cut first, so that the tokens at the beginning and the end stay.
        room = max(most - self.backend.num_special_tokens_to_add(is_pair=False), 0)
        encoding.truncate(room, direction=side or self.truncation_side)
        return list(self.backend.post_process(encoding).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes of broken characters become U+FFFD."""
        if len(ids) < _LONG:
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    @cached_property
    def of_transformers(self) -> Any:
        """The same vocabulary and templates in a copy, with the interface of transformers.

        Raises:
            InputError: transformers is not installed.
        """
        templates: Any = dict(self.chat_templates)
        if templates.keys() == {"default"}:
            templates = templates["default"]
        return import_extra("transformers").PreTrainedTokenizerFast(
            tokenizer_object=self.backend,
            truncation_side=self.truncation_side,
            chat_template=templates or None,
            **self.special_tokens,
        )

    def tokens_as_written(self, ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary writes them, such as ``Ġcat``. Unknown ids are empty."""
        return [self.backend.id_to_token(token) or "" for token in ids]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token in UTF-8. A token may be a part of a character."""
        text = self.decode([token], skip_special_tokens=False)
        # Only a part of a character needs a look at the vocabulary.
        if _BROKEN not in text:
            return text.encode()
        written = self.backend.id_to_token(token) or ""
        fallback = _BYTE_TOKEN.fullmatch(written)
        if fallback is not None:
            return bytes([int(fallback[1], 16)])
        if set(written) <= _BYTE_LEVEL.keys():
            return bytes(_BYTE_LEVEL[character] for character in written)
        return text.encode()


def open_tokenizer(weights: Weights) -> Tokenizer:
    """Open the tokenizer of a checkpoint.

    The library tokenizers reads ``tokenizer.json`` and GGUF files alone. Other files go through
    transformers, and settings that contradict ``tokenizer.json``. Its import takes seconds.

    Raises:
        VocabularyError: the vocabulary of a GGUF file is of an unknown kind.
        CheckpointError: there is no tokenizer, the tokenizer is damaged, or a setting is refused.
        InputError: a library for the tokenizer is not installed.
    """
    if weights.is_gguf:
        backend = gguf_tokenizer(weights.metadata, weights.path)
        special = special_tokens(weights.metadata)
        return _opened(weights.path, backend, special, chat_templates(weights.metadata))
    folder = weights.path if weights.path.is_dir() else weights.path.parent
    if (folder / "tokenizer.json").is_file():
        return _from_folder(folder) or _through_transformers(weights)
    if (folder / "tekken.json").is_file():
        return _from_tekken(folder)
    return _through_transformers(weights)


def find_tokenizer(weights: Weights) -> Tokenizer | None:
    """Open the tokenizer of a checkpoint. Return ``None`` if it has none, for prompts of token ids.

    Raises:
        VocabularyError: the vocabulary of a GGUF file is of an unknown kind.
        CheckpointError: the tokenizer is damaged, or a setting is refused.
        InputError: a library for the tokenizer is not installed.
    """
    model = weights.metadata.get("tokenizer.ggml.model")
    if model is not None:
        return None if model in NO_TOKENIZER else open_tokenizer(weights)
    folder = weights.path if weights.path.is_dir() else weights.path.parent
    there = any((folder / name).is_file() for name in _FILES)
    return open_tokenizer(weights) if there else None


def _through_transformers(weights: Weights) -> Tokenizer:
    loaded = load_tokenizer(weights)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(
            f"{weights.path} has a tokenizer of the class {type(loaded).__name__}, which is "
            "written in Python alone: convert it to a tokenizer.json"
        )
    given = loaded.chat_template or {}
    templates = given if isinstance(given, Mapping) else {"default": given}
    clean_spaces(backend, vars(loaded))
    special = loaded.special_tokens_map
    return _opened(weights.path, backend, special, templates, loaded.truncation_side)


def _from_folder(folder: Path) -> Tokenizer | None:
    """Open a ``tokenizer.json``. Return None if the settings ask for another tokenizer."""
    file = folder / "tokenizer.json"
    library = import_extra("tokenizers")
    stated = read_settings(folder)
    problems = refusals(TOKENIZER_CONFIG, stated)
    if problems:
        raise CheckpointError.listing(
            f"{folder / 'tokenizer_config.json'} has settings that are not read here",
            problems,
            "take them out, or save the tokenizer again with save_pretrained",
        )
    try:
        backend = library.Tokenizer.from_file(str(file))
        config = _config(folder)
        of_bytes = is_of_bytes(backend)
        usual = usual_tokens(stated, config, of_bytes)
        steps = steps_of_class(stated, config, of_bytes)
        settings = {**padding_token(backend, steps), **usual, **stated}
        if adds_more(stated, config) or needs_transformers(backend, settings, steps):
            return None
        # Some checkpoints have the side in tokenizer.json alone.
        cut = backend.truncation or {}
        side = settings.get("truncation_side") or cut.get("direction") or "right"
        special = add_tokens(backend, settings)
        backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
        clean_spaces(backend, settings)
        templates = _templates(folder, settings)
    # The library raises plain exceptions, and damaged values lead to nearly any error.
    except Exception as error:
        raise CheckpointError(
            f"{file}, or what lies beside it, is no tokenizer that can be read: "
            f"{described(error)}. Save it again with save_pretrained."
        ) from error
    return _opened(folder, backend, special, templates, side)


def _from_tekken(folder: Path) -> Tokenizer:
    """Open a ``tekken.json``, the vocabulary of Mistral's models."""
    file = folder / "tekken.json"
    conversion = import_extra("transformers.integrations.mistral.tokenizer")
    processors = import_extra("tokenizers").processors
    try:
        backend = conversion.MistralConverter(str(file)).converted()
        begin = backend.token_to_id(_TEKKEN_TOKENS["bos_token"])
        # The converter leaves out the token that every text of Mistral's models begins with.
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", begin)]
        )
        templates = _templates(folder, {})
    # Damaged values lead to nearly any error.
    except Exception as error:
        raise CheckpointError(
            f"{file} is no vocabulary that can be read: {described(error)}. Download it again."
        ) from error
    return _opened(folder, backend, _TEKKEN_TOKENS, templates)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return read_json(file) if file.is_file() else {}


def _opened(
    path: Path,
    backend: Any,
    special: Mapping[str, str],
    templates: Mapping[str, str],
    truncation_side: str = "right",
) -> Tokenizer:
    # Files of sentence encoders may ask for cutting and filling. Prompts need neither.
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(path, backend, dict(special), dict(templates), truncation_side)


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a folder, from files or else from settings."""
    extra = folder / "additional_chat_templates"
    files = {file.stem: file for file in sorted(extra.glob("*.jinja"))}
    files["default"] = folder / "chat_template.jinja"
    found = {}
    for name, file in files.items():
        if file.is_file():
            found[name] = file.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if found or given is None:
        return found
    if isinstance(given, str):
        return {"default": given}
    return {row["name"]: row["template"] for row in given}
