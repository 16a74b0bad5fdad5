"""Chats as the text that a model was trained on, by the template in its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opgraft.errors import CheckpointError, RequestError, close_matches
from opgraft.serving.template_answer import AnswerKind
from opgraft.serving.template_renderer import TemplateRenderer
from opgraft.serving.tokenizer import Tokenizer

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold the same."""


class ChatTemplate:
    """The chat templates of one tokenizer. They are rendered in a helper process with limits."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._renderer = TemplateRenderer()

    @property
    def source(self) -> str:
        """The source of all templates, empty if there are none."""
        return "\n".join(self._tokenizer.chat_templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        name: str | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat.

        Args:
            messages: plain data, usually with ``role`` and ``content``. Keys whose value is None
                are left out.
            tools: JSON schemas of functions that the model may call.
            documents: texts that the model may quote.
            add_generation_prompt: end with the text before an answer.
            name: the template's name; by default ``tool_use`` with tools, else ``default``.
            values: further values for the template, by name, such as ``enable_thinking``.

        Raises:
            RequestError: the model has no chat template or none of the name, or the template
                refuses the messages, fails, or exceeds a limit of time, memory or characters.
            CheckpointError: the template's source is no template.
            ChildError: the helper process could not be started.
        """
        if not messages:
            raise RequestError(
                'the chat has no messages: give one at least, such as {"role": "user", "content": "..."}'
            )
        chosen = name or self._default(tools)
        source = self._source(chosen)
        chat = [_message(message, index) for index, message in enumerate(messages)]
        extra = {"tools": tools, "documents": documents, **(values or {})}
        known = {
            **self._tokenizer.special_tokens,
            **{key: _as_plain_data(value, key) for key, value in extra.items()},
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            kind, text = self._renderer.render(source, known)
        except RecursionError:
            kind, text = AnswerKind.REFUSED, "they are nested too deeply"
        if kind is AnswerKind.TEXT:
            return text
        if kind is AnswerKind.INVALID:
            raise CheckpointError(
                f"the chat template {chosen!r} of {self._tokenizer.path}{text}. Download it again, or pass prompts "
                "as text."
            )
        raise RequestError(
            f"the chat template {chosen!r} of the model cannot make a text of these {len(chat)} messages: {text}. "
            "Change the messages, or pass a prompt as text."
        )

    def _default(self, tools: object) -> str:
        return (
            "tool_use"
            if tools is not None and "tool_use" in self._tokenizer.chat_templates
            else "default"
        )

    def _source(self, name: str) -> str:
        sources = self._tokenizer.chat_templates
        if name in sources:
            return sources[name]
        if not sources:
            raise RequestError(
                "the model has no chat template, so how it was taught to chat is not known: pass a prompt as text "
                "to generate(), or put a chat_template.jinja beside the weights"
            )
        raise RequestError(
            f"the model has no chat template {name!r:.80}: {close_matches(name[:80], sources)}"
        )


def _message(message: object, index: int) -> dict[str, Any]:
    """Return a copy of a message for a template, its reasoning under the keys that templates look for."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{index}] is {type(message).__name__}, expected a dict: {{'role': 'user', 'content': '...'}}"
        )
    plain = {
        key: value
        for key, value in _as_plain_data(message, f"messages[{index}]").items()
        if value is not None
    }
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return (
        plain
        if reasoning is None
        else {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    )


def _as_plain_data(value: Any, place: str) -> Any:
    """Copy plain data, so that a template reaches no object of the caller's and no method of one.

    Raises:
        RequestError: there is something else in it.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {
            _as_plain_data(key, f"a key of {place}"): _as_plain_data(inner, f"{place}[{key!r:.40}]")
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_as_plain_data(inner, f"{place}[{index}]") for index, inner in enumerate(value)]
    raise RequestError(
        f"{place} is {type(value).__name__}, and chat templates take plain data: convert it to text, numbers, "
        "lists and dicts"
    )
