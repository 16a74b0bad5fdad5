"""``ChatFormat``: the form in which a family of models writes chats."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opgraft.errors import RequestError
from opgraft.serving.outputs import CompletionOutput
from opgraft.serving.prompts import expect_unicode

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names for the reasoning of a message, in different templates."""


class UserText(ABC):
    """Reads the text for the user from one growing answer."""

    @abstractmethod
    def read(self, answer: CompletionOutput) -> str:
        """Return the text so far, without the reasoning. The text only grows."""


class WholeText(UserText):
    """Shows the whole text of an answer."""

    def read(self, answer: CompletionOutput) -> str:
        return answer.text


class ChatFormat(ABC):
    """The form in which a family of models writes chats."""

    @property
    @abstractmethod
    def source(self) -> str:
        """A text with the markers of the form, such as the source of a chat template."""

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer, beside those that the checkpoint names."""
        return frozenset()

    @abstractmethod
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> str | list[int]:
        """Return the prompt of a chat: text, or token ids.

        Args:
            messages: plain data, usually with ``role`` and ``content``. Keys with the value None
                are left out.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: end with the text of the last message, so that the model goes on
                with this message. There is no beginning of an answer then.
            values: further values by name, such as ``reasoning_effort``.

        Raises:
            RequestError: the messages cannot be written in this form.
        """

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens that the form needs, by their texts."""
        return {}

    def user_text(self, prompt: Sequence[int]) -> UserText:
        """Return a reader of the answer to a prompt, for people.

        Args:
            prompt: token ids before the answer.
        """
        return WholeText()


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of messages, with the reasoning of each under every usual key.

    Raises:
        RequestError: there is no message, or a message is no plain data.
    """
    if not messages:
        raise RequestError(
            "the chat has no messages: give one at least, such as "
            '{"role": "user", "content": "..."}'
        )
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: object, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{index}] is {type(message).__name__}, expected a dict: "
            "{'role': 'user', 'content': '...'}"
        )
    copied = as_plain_data(message, f"messages[{index}]")
    # OpenAI's clients send null for fields without a value, and templates test for presence.
    plain = {key: value for key, value in copied.items() if value is not None}
    for key in _REASONING:
        if key in plain:
            # Templates of gpt-oss read the first key, and most others the second.
            return {"thinking": plain[key], **plain, "reasoning_content": plain[key]}
    return plain


def text_to_continue(message: Mapping[str, Any]) -> str:
    """Return the text of the last message of a chat, for the model to go on with.

    Raises:
        RequestError: the content is no text, or is blank, or calls follow.
    """
    if message.get("tool_calls"):
        raise RequestError(
            "continue_final_message goes on with the text of the last message, and calls follow "
            "this text: leave tool_calls out, or continue_final_message"
        )
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        return content
    raise RequestError(
        "continue_final_message goes on with the last message, which has no text: give "
        "that message a text, or leave continue_final_message out"
    )


def content_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message as text.

    Raises:
        RequestError: the text has half of a surrogate pair.
    """
    text = str(message.get("content") or "")
    expect_unicode(text, "the chat")
    return text


def arguments_text(call: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON.

    Raises:
        RequestError: the text has half of a surrogate pair.
    """
    given = call["function"].get("arguments")
    # OpenAI's form has JSON as text. Some clients send the object itself.
    text = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    expect_unicode(text, "the chat")
    return text


def functions_of(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """Return the functions of tools, in OpenAI's form or plain."""
    return [tool.get("function", tool) for tool in tools or ()]


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts in plain data, with the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts_of(key)
            yield from texts_of(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from texts_of(inner)


def as_plain_data(value: Any, place: str) -> Any:
    """Copy plain data, so that a template reaches no object of the caller, and no method.

    Raises:
        RequestError: there is an object of another type.
    """
    # The exact types: a subclass may bring methods that a template could call.
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        copied = {}
        for key, inner in value.items():
            plain_key = as_plain_data(key, f"a key of {place}")
            copied[plain_key] = as_plain_data(inner, f"{place}[{key!r:.40}]")
        return copied
    if isinstance(value, list | tuple):
        return [as_plain_data(inner, f"{place}[{index}]") for index, inner in enumerate(value)]
    raise RequestError(
        f"{place} is {type(value).__name__}, and chat templates take plain data: convert it to "
        "text, numbers, lists and dicts"
    )
