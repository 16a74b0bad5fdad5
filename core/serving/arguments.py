"""Arguments of ``LLM``, for one prompt or for several, as a list with an entry for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import RequestError

_T = TypeVar("_T")
_PROMPT = "text, a list of token ids, {'prompt': ...} or {'prompt_token_ids': [...]}"
_MESSAGE = "{'role': 'user', 'content': '...'}"


def listed_prompts(given: Any, what: str = "prompts") -> Sequence[Any]:
    """Return prompts as a list, also where it is a single one.

    Args:
        given: what a user passed.
        what: the argument's name, for errors.

    Raises:
        RequestError: it is neither a prompt nor a list of prompts.
    """
    if isinstance(given, str | Mapping):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise RequestError(f"{what} is {_kind(given)}: give {_PROMPT}, or a list of these", what)
    return [given] if given and isinstance(given[0], int) else given


def listed_chats(given: Any) -> Sequence[Any]:
    """Return chats as a list, also where it is a single one.

    Raises:
        RequestError: it is neither a list of messages nor a list of such lists.
    """
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise RequestError(
            f"messages is {_kind(given)}: give a list of messages such as {_MESSAGE}", "messages"
        )
    if given and isinstance(given[0], Mapping):
        return [given]
    for index, chat in enumerate(given):
        if isinstance(chat, str | bytes | Mapping) or not isinstance(chat, Sequence):
            name = placed("chat", index, len(given))
            raise RequestError(
                f"{name} is {_kind(chat)}: give a list of messages such as {_MESSAGE}", "messages"
            )
    return given


def text_messages(chat: Sequence[Any]) -> list[Any]:
    """Return the messages of a chat with the text of those whose content is a list of parts, OpenAI's form.

    Raises:
        RequestError: a part is no text.
    """
    return [_text_message(message, index) for index, message in enumerate(chat)]


def _text_message(message: Any, index: int) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    for place, part in enumerate(content):
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"messages[{index}].content[{place}] is {kind!r:.40}: the model takes text, as in "
                "{'type': 'text', 'text': '...'}",
                "messages",
            )
    return {**message, "content": "\n".join(part["text"] for part in content)}


def placed(what: str, index: int, count: int) -> str:
    """Name one of several prompts or chats by its place in their list, and a single one as such."""
    return f"the {what}" if count == 1 else f"{what} {index + 1} of {count}"


def params_for(given: Any, prompts: int) -> Sequence[SamplingParams]:
    """Return the ``SamplingParams`` of each of so many prompts.

    Raises:
        RequestError: they are something else, or as many as there are no prompts.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * prompts
    if isinstance(given, str) or not isinstance(given, Sequence):
        expect_params(given)
    each = _as_many(given, prompts, "SamplingParams", "sampling_params")
    for params in each:
        expect_params(params)
    return each


def priorities_for(given: Any, prompts: int) -> Sequence[int]:
    """Return the priority of each of so many prompts.

    Raises:
        RequestError: there are as many priorities as there are no prompts.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        return _as_many(given, prompts, "priorities", "priority")
    one: Any = given  # of whatever kind: a request refuses what is no priority
    return [one] * prompts


def expect_params(given: Any) -> None:
    """Refuse what is no ``SamplingParams``.

    Raises:
        RequestError: it is something else.
    """
    if not isinstance(given, SamplingParams):
        advice = "SamplingParams(**params)" if isinstance(given, Mapping) else "SamplingParams(...)"
        raise RequestError(f"sampling_params is {_kind(given)}: give {advice}", "sampling_params")


def _as_many(given: Sequence[_T], prompts: int, what: str, field: str) -> Sequence[_T]:
    if len(given) != prompts:
        raise RequestError(
            f"{prompts} prompts come with {len(given)} {what}: give one for all, or one each", field
        )
    return given


def _kind(given: object) -> str:
    """Say what was given: a short value itself, of others the type."""
    return (
        repr(given)
        if given is None or isinstance(given, int | float)
        else f"of the type {type(given).__name__}"
    )
