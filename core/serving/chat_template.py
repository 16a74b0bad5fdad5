"""Chats as text for a model, by the chat template of its checkpoint."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opgraft.base.timeline import phase
from opgraft.errors import CheckpointError, OpgraftError, RequestError, close_matches
from opgraft.serving.chat_format import (
    ChatFormat,
    as_plain_data,
    plain_messages,
    text_to_continue,
)
from opgraft.serving.template_answer import AnswerKind
from opgraft.serving.template_renderer import TemplateRenderer
from opgraft.serving.tokenizer import Tokenizer


class ChatTemplate(ChatFormat):
    """The chat templates of one tokenizer. They are rendered in a helper process with limits."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._renderer = TemplateRenderer()

    @property
    def source(self) -> str:
        """The source of all templates, empty if there are none."""
        return "\n".join(self._tokenizer.chat_templates.values())

    @phase("template")
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        name: str | None = None,
        source: str | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat.

        Args:
            messages: plain data, usually with ``role`` and ``content``. Keys with the value None
                are left out.
            tools: JSON schemas of functions that the model may call.
            documents: texts for the model to quote.
            add_generation_prompt: end with the text before an answer.
            continue_final_message: end with the text of the last message, so that the model goes on
                with this message. There is no text before an answer then.
            name: the template's name; by default ``tool_use`` with tools, else ``default``.
            source: a template in place of the model's own.
            values: further values for the template, by name, such as ``enable_thinking``.

        Raises:
            RequestError: the model has no chat template of the name, or the template refuses the
                messages, fails, or exceeds a limit of time, memory or characters.
            CheckpointError: the source is no valid template.
            ChildError: the helper process could not be started.
        """
        chat = plain_messages(messages)
        chosen = name or self._default(tools)
        template = self._source(chosen) if source is None else source
        end = _EndOfMessage(chat[-1]) if continue_final_message else None
        if end is not None:
            chat[-1] = end.marked
        given = {"tools": tools, "documents": documents, **(values or {})}
        further = {key: as_plain_data(value, key) for key, value in given.items()}
        # Messages come last: no value of a request takes their place.
        known = {
            **self._tokenizer.special_tokens,
            **further,
            "messages": chat,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            kind, text = self._renderer.render(template, known)
        # Raised while the values are written for the helper.
        except RecursionError:
            kind = AnswerKind.REFUSED
            text = "they are nested too deeply"
        if kind is AnswerKind.TEXT:
            return text if end is None else end.up_to(text)
        if kind is AnswerKind.INVALID:
            raise self._invalid(chosen, source, text)
        raise self._refused(chosen, source, text, len(chat))

    def _refused(self, name: str, source: str | None, reason: str, count: int) -> RequestError:
        """Make the error about a template that makes no text of ``count`` messages."""
        return RequestError(
            f"{self._origin(name, source)} cannot make a text of these {count} "
            f"messages: {reason}. Change the messages, or pass a prompt as text."
        )

    def _invalid(self, name: str, source: str | None, fault: str) -> OpgraftError:
        """Make the error about a template that cannot be compiled."""
        if source is not None:
            return RequestError(f"the given chat template{fault}. Correct it, or leave it out.")
        return CheckpointError(
            f"the chat template {name!r} of {self._tokenizer.path}{fault}. Download it again, "
            "or pass prompts as text."
        )

    def _origin(self, name: str, source: str | None) -> str:
        """Return words for the place of a template."""
        if source is not None:
            return "the given chat template"
        file = self._tokenizer.template_file
        if file is not None:
            return f"the chat template of the file {Path(file).name}"
        return f"the chat template {name!r} of the model"

    def _default(self, tools: object) -> str:
        """Return the name of the template for a call without a name."""
        if tools is not None and "tool_use" in self._tokenizer.chat_templates:
            return "tool_use"
        return "default"

    def _source(self, name: str) -> str:
        sources = self._tokenizer.chat_templates
        if name in sources:
            return sources[name]
        if not sources:
            raise RequestError(
                "the model has no chat template, so how it was taught to chat is not known: pass a "
                "prompt as text to generate(), or put a chat_template.jinja beside the weights"
            )
        raise RequestError(
            f"the model has no chat template {name!r:.80}: {close_matches(name[:80], sources)}"
        )


class _EndOfMessage:
    """The end of a message's content, which a mark shows in the text of a chat.

    The content alone would not show its place: ``end`` is also in the mark ``<|im_end|>`` of a
    template.

    Args:
        message: the last message of a chat.

    Raises:
        RequestError: the content is no text, or is blank.
    """

    def __init__(self, message: Mapping[str, Any]) -> None:
        content = text_to_continue(message)
        self._text = content.strip()
        # No message has these random digits. The letters show a change of case.
        self._mark = f"End{secrets.token_hex(16)}"
        kept = content.rstrip()
        self._blanks = content[len(kept) :]
        # Blanks come last, as a template may leave blanks around the content out.
        self.marked = {**message, "content": kept + self._mark + self._blanks}

    def up_to(self, text: str) -> str:
        """Return the text of the chat with the marked message up to the end of the content.

        Raises:
            RequestError: the template changes the content.
        """
        before, mark, behind = text.rpartition(self._mark)
        # A template may shorten the content, put it in upper case, or leave it out.
        if not mark or not before.endswith(self._text):
            raise RequestError(
                "continue_final_message goes on with the last message, and the chat template "
                "changes its text: leave continue_final_message out"
            )
        return before + self._blanks if behind.startswith(self._blanks) else before
