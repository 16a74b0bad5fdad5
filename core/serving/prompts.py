"""Prompts as text or as token ids, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from opgraft.errors import RequestError
from opgraft.serving.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, str | Sequence[int]]
"""Text, token ids, or ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``.

The last two may also have the key ``"cache_salt"``.
"""

_TEXT = "prompt"
_IDS = "prompt_token_ids"
_SALT = "cache_salt"


def unsalted(
    prompt: Prompt, name: str = "the prompt", cache_salt: str | None = None
) -> tuple[Prompt, str | None]:
    """Return a prompt as text or token ids, and the salt for the cache.

    The salt comes with the prompt or as the argument.

    Raises:
        RequestError: a mapping has other keys, or both text and token ids, or another salt than the
            argument.
    """
    if not isinstance(prompt, Mapping):
        return prompt, cache_salt
    given = _content_of_prompt(prompt, name)
    salt = prompt.get(_SALT)
    if None not in (salt, cache_salt) and salt != cache_salt:
        raise RequestError(
            f"{name} has the {_SALT} {salt!r:.40}, and the argument of that name is "
            f"{cache_salt!r:.40}: leave one out",
            _SALT,
        )
    return given, cache_salt if salt is None else salt  # type: ignore[return-value]


def _content_of_prompt(prompt: Mapping[str, Any], name: str) -> Any:
    """Return the text or the token ids of a prompt in a mapping."""
    contents = {_TEXT, _IDS} & prompt.keys()
    unknown = prompt.keys() - {_TEXT, _IDS, _SALT}
    if len(contents) != 1 or unknown:
        keys = ", ".join(repr(key)[:40] for key in prompt) or "none"
        raise RequestError(
            f"{name} has the keys {keys}: give either {_TEXT!r} or {_IDS!r}, and {_SALT!r} if you "
            "like"
        )
    key = _TEXT if _TEXT in prompt else _IDS
    given = prompt[key]
    if isinstance(given, str) != (key == _TEXT):
        expected = "text" if key == _TEXT else "a list of token ids"
        raise RequestError(
            f"{name} has {key!r} of the type {type(given).__name__}: give {expected}"
        )
    return given


def tokenized(
    prompt: Prompt,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    max_model_len: int,
    room: int = 1,
    add_special_tokens: bool = True,
    name: str = "the prompt",
    advice: str = "",
    truncate: bool = False,
    keep_last: int | None = None,
    wanted: int = 1,
) -> tuple[str | None, list[int]]:
    """Return the text of a prompt (None for a prompt of token ids), and the token ids.

    Args:
        prompt: text or token ids of a user.
        tokenizer: for text.
        vocab_size: rows of the model's embedding.
        max_model_len: tokens of the longest sequence.
        room: number of tokens to fit after the prompt; 0 for an encoder.
        add_special_tokens: begin and end a text as usual; False after a chat template.
        name: of the prompt, for errors.
        advice: a further remedy for a long prompt.
        truncate: cut a long text instead of refusing it.
        keep_last: most tokens, counted from the end; None for all. The tokens that usually begin
            and end a text stay.
        wanted: tokens that the answer may have, for the advice about a long prompt.

    Raises:
        RequestError: the prompt is of another kind, empty, too long, or has unknown ids or
            characters.
    """
    prompt, _ = unsalted(prompt, name)
    text = prompt if isinstance(prompt, str) else None
    if text is None:
        ids = _checked_prompt(prompt, name)
    else:
        # The library would fail at the text with an error that names no prompt.
        expect_unicode(text, name)
        if truncate:
            ids = tokenizer.encode_truncated(text, max_model_len)
        elif keep_last is not None and add_special_tokens:
            ids = tokenizer.encode_truncated(text, keep_last, side="left")
        else:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    # A list of token ids or a chat, or there is no room even for the usual tokens.
    if keep_last is not None:
        ids = ids[-keep_last:]
    if not ids:
        raise RequestError(f"{name} has no tokens: give some text, or at least one token id")
    if len(ids) + room > max_model_len:
        # A prompt without room for its answer would be refused next.
        answer = min(max(room, wanted), max_model_len - 1) if room else 0
        also = f" and needs room for {answer} more" if room else ""
        excess = len(ids) + answer - max_model_len
        plural = "" if excess == 1 else "s"
        # litellm knows the error by "this model's maximum context length is".
        raise RequestError(
            f"{name} has {len(ids)} tokens{also}, and this model's maximum context length is "
            f"{max_model_len} tokens: shorten it by {excess} token{plural}, or raise "
            f"model.max_model_len as far as the model allows{advice}",
            code="context_length_exceeded",
        )
    # Ids of a text are in the vocabulary, unless the tokenizer belongs to another model.
    if text is None or max(ids) >= vocab_size:
        _expect_tokens(ids, vocab_size, name)
    return text, list(ids)


def expect_unicode(text: str, name: str) -> None:
    """Check that a text has whole characters.

    Raises:
        RequestError: it has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!a}"
        raise RequestError(
            f"{name} has half a surrogate pair, {half}, at character {error.start}, which no text "
            "may contain: remove it, or decode the text that it comes from with errors='replace'"
        ) from error


def _checked_prompt(prompt: object, name: str) -> Sequence[int]:
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise RequestError(
            f"{name} is {type(prompt).__name__}: give text, a list of token ids, or "
            f"{{{_IDS!r}: [...]}}"
        )
    return prompt


def _expect_tokens(ids: Sequence[object], vocab_size: int, name: str) -> None:
    for place, token in enumerate(ids):
        # Not isinstance: True is an integer in Python.
        if type(token) is not int:
            raise RequestError(
                f"{name} has {token!r:.40} at place {place}, which is no token id: give whole "
                "numbers"
            )
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} has the token id {token!s:.20} at place {place}, and the vocabulary has "
                f"{vocab_size} (0 to {vocab_size - 1}): encode the text with this model's tokenizer"
            )
