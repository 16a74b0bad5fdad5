"""Chats as the text that a model was trained on, by the template in its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from opgraft.errors import CheckpointError, RequestError, close_matches
from opgraft.serving.template_budget import limited
from opgraft.serving.template_environment import TemplateEnvironment
from opgraft.serving.tokenizer import Tokenizer
from opgraft.text import described

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold the same."""


class ChatTemplate:
    """The chat templates of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: dict[str, Any] = {}

    @cached_property
    def _environment(self) -> TemplateEnvironment:
        return TemplateEnvironment()

    @property
    def source(self) -> str:
        """The source of all templates, empty where there are none."""
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
            messages: plain data, usually with ``role`` and ``content``. Keys whose value is None are left out.
            tools: JSON schemas of functions that the model may call.
            documents: texts that the model may quote.
            add_generation_prompt: end with what comes before an answer.
            name: of the template where there are several; by default ``tool_use`` with tools and ``default`` else.
            values: what else the template knows, by name; such as ``enable_thinking``.

        Raises:
            RequestError: the model has no chat template or none of the name, or the template refuses the messages,
                fails, runs on without end, or makes a huge text.
            CheckpointError: the template is none.
        """
        if not messages:
            raise RequestError(
                'the chat has no messages: give one at least, such as {"role": "user", "content": "..."}'
            )
        chosen = name or self._default(tools)
        template = self._template(chosen)
        chat = [_message(message, index) for index, message in enumerate(messages)]
        extra = {"tools": tools, "documents": documents, **(values or {})}
        known = {
            **self._tokenizer.special_tokens,
            **{key: _plain(value, key) for key, value in extra.items()},
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with limited():
                return str(template.render(known))
        except Exception as error:  # a template can do nearly anything that raises
            reason = str(error) if isinstance(error, jinja2.TemplateError) else described(error)
            raise RequestError(
                f"the chat template {chosen!r} of the model cannot make a text of these {len(chat)} messages: "
                f"{reason}. Change the messages, or pass a prompt as text."
            ) from error

    def _default(self, tools: object) -> str:
        return (
            "tool_use"
            if tools is not None and "tool_use" in self._tokenizer.chat_templates
            else "default"
        )

    def _template(self, name: str) -> Any:
        if name not in self._compiled:
            self._compiled[name] = self._compile(name)
        return self._compiled[name]

    def _compile(self, name: str) -> Any:
        sources = self._tokenizer.chat_templates
        if name not in sources:
            if not sources:
                raise RequestError(
                    "the model has no chat template, so how it was taught to chat is not known: pass a prompt as text "
                    "to generate(), or put a chat_template.jinja beside the weights"
                )
            raise RequestError(
                f"the model has no chat template {name!r:.80}: {close_matches(name[:80], sources)}"
            )
        try:
            return self._environment.compiled(sources[name])
        except Exception as error:  # of syntax mostly, and of nesting too deep
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise CheckpointError(
                f"the chat template {name!r} of {self._tokenizer.path}{line} is none: {described(error)}. Download it "
                "again, or pass prompts as text."
            ) from error


def _message(message: object, index: int) -> dict[str, Any]:
    """Return a copy of a message for a template, its reasoning under the keys that templates look for."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{index}] is {type(message).__name__}, expected a dict: {{'role': 'user', 'content': '...'}}"
        )
    plain = {
        key: value
        for key, value in _plain(message, f"messages[{index}]").items()
        if value is not None
    }
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return (
        plain
        if reasoning is None
        else {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    )


def _plain(value: Any, place: str) -> Any:
    """Copy plain data, so that a template reaches no object of the caller's and no method of one.

    Raises:
        RequestError: there is something else in it.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {
            _plain(key, f"a key of {place}"): _plain(inner, f"{place}[{key!r:.40}]")
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{place}[{index}]") for index, inner in enumerate(value)]
    raise RequestError(
        f"{place} is {type(value).__name__}, and chat templates take plain data: convert it to text, numbers, "
        "lists and dicts"
    )
