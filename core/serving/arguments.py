"""Arguments of ``LLM`` as lists, for one prompt or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from opgraft.base.progress import Shown
from opgraft.engine.lora.request import LoRARequest
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import RequestError

_T = TypeVar("_T")
_PROMPT = "text, a list of token ids, {'prompt': ...} or {'prompt_token_ids': [...]}"
_MESSAGE = "{'role': 'user', 'content': '...'}"


def listed_prompts(given: Any, what: str = "prompts") -> Sequence[Any]:
    """Return prompts as a list. A single prompt becomes a list of one.

    Args:
        given: the argument of a user.
        what: name of the argument, for errors.

    Raises:
        RequestError: the argument is neither a prompt nor a list of prompts.
    """
    if isinstance(given, str | Mapping):
        return [given]
    # Bytes are a sequence of integers, and would pass for token ids.
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise RequestError(f"{what} is {_kind(given)}: give {_PROMPT}, or a list of these", what)
    # A list of integers is a single prompt of token ids.
    if given and isinstance(given[0], int):
        return [given]
    return given


def listed_chats(given: Any) -> Sequence[Any]:
    """Return chats as a list. A single chat becomes a list of one.

    Raises:
        RequestError: the argument is neither a list of messages nor a list of such lists.
    """
    _expect_list_of_messages(given, "messages")
    if given and isinstance(given[0], Mapping):
        return [given]
    for index, chat in enumerate(given):
        _expect_list_of_messages(chat, placed("chat", index, len(given)))
    listed: Sequence[Any] = given
    return listed


def _expect_list_of_messages(given: Any, name: str) -> None:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise RequestError(
            f"{name} is {_kind(given)}: give a list of messages such as {_MESSAGE}", "messages"
        )


def text_messages(chat: Sequence[Any]) -> list[Any]:
    """Return the messages of a chat with their content as text.

    OpenAI's form of a content is a list of parts, such as ``{"type": "text", "text": "Hello"}``.

    Raises:
        RequestError: a part is no text.
    """
    return [_text_message(message, index) for index, message in enumerate(chat)]


def _text_message(message: Any, index: int) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    for place, part in enumerate(content):
        if not _is_text_part(part):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"messages[{index}].content[{place}] is {kind!r:.40}: the model takes text, as in "
                "{'type': 'text', 'text': '...'}",
                "messages",
            )
    # Chat templates expect one text. vLLM joins the parts in the same way.
    text = "\n".join(part["text"] for part in content)
    return {**message, "content": text}


def _is_text_part(part: Any) -> bool:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        return False
    return isinstance(part.get("text"), str)


def placed(what: str, index: int, count: int) -> str:
    """Return a name for a prompt or chat: "the prompt", or "prompt 2 of 3"."""
    if count == 1:
        return f"the {what}"
    return f"{what} {index + 1} of {count}"


def params_for(given: Any, prompts: int, default: SamplingParams) -> Sequence[SamplingParams]:
    """Return the ``SamplingParams`` of each prompt, ``default`` if none are given.

    Raises:
        RequestError: the argument is something else, or a list of another length.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or default] * prompts
    # Neither is a list of params, so this raises the error about the type.
    if isinstance(given, str) or not isinstance(given, Sequence):
        expect_params(given)
    each = _as_many(given, prompts, "SamplingParams", "sampling_params")
    for params in each:
        expect_params(params)
    return each


def priorities_for(given: Any, prompts: int) -> Sequence[int]:
    """Return the priority of each prompt.

    Raises:
        RequestError: the argument is a list of another length.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        return _as_many(given, prompts, "priorities", "priority")
    # Of any type: the request itself refuses wrong ones. None is vLLM's default.
    one: Any = 0 if given is None else given
    return [one] * prompts


def loras_for(given: Any, prompts: int) -> Sequence[LoRARequest | None]:
    """Return the adapter of each prompt.

    Raises:
        RequestError: the argument is a list of another length.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        return _as_many(given, prompts, "adapters", "lora_request")
    # Of any type: the request itself refuses wrong ones.
    return [given] * prompts


def shown_bar(progress: bool | None, use_tqdm: Shown) -> Shown:
    """Return the bar to show, from the two names of the argument.

    Raises:
        RequestError: both are given.
    """
    if progress is None:
        return use_tqdm
    if use_tqdm is not None:
        raise RequestError(
            f"progress is {progress} and use_tqdm {use_tqdm!r:.40}, two names of one argument: "
            "leave one out",
            "use_tqdm",
        )
    return progress


def expect_params(given: Any) -> None:
    """Check that an argument is a ``SamplingParams``.

    Raises:
        RequestError: the argument is something else.
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
    """Return words for an argument: numbers and None themselves, or the type."""
    if given is None or isinstance(given, int | float):
        return repr(given)
    return f"of the type {type(given).__name__}"
