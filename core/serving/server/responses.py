"""``/v1/responses``: answers of items, and conversations that the server keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any
from uuid import uuid4

from opgraft.errors import HTTPError
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.protocol import ChatRequest
from opgraft.serving.server.responses_protocol import (
    CallItem,
    CallOutputItem,
    FunctionChoice,
    Item,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
)
from opgraft.serving.server.service import Service
from opgraft.serving.server.streams import event
from opgraft.serving.server.translated import (
    Block,
    BlockKind,
    TranslatedRequest,
    called,
    joined,
    sampled,
    with_one_system_message,
)

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "function.parameters": "parameters",
}
"""Parts of names in chats → parts of names here."""

_LOGPROBS = "message.output_text.logprobs"
_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}


def chat_messages(items: str | Sequence[Item]) -> list[dict[str, Any]]:
    """Return the items of a conversation as messages of a chat.

    Reasoning, text and calls that follow each other are one message of the model.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, ReasoningItem):
            message = _model_message(messages)
            reasoning = joined(item.content or item.summary or "")
            earlier = message.get("reasoning_content")
            message["reasoning_content"] = f"{earlier}\n{reasoning}" if earlier else reasoning
        elif isinstance(item, CallItem):
            _model_message(messages).setdefault("tool_calls", []).append(
                called(item.name, item.arguments, item.call_id)
            )
        elif isinstance(item, CallOutputItem):
            result = {"tool_call_id": item.call_id, "content": joined(item.output)}
            messages.append({"role": "tool", **result})
        elif item.role == "assistant" and _only_reasons(messages):
            messages[-1]["content"] = joined(item.content)
        else:
            messages.append({"role": item.role, "content": joined(item.content)})
    return messages


def _model_message(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last message if the model has written it, else a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _only_reasons(messages: Sequence[Mapping[str, Any]]) -> bool:
    return bool(messages) and messages[-1].keys() == {"role", "reasoning_content"}


def chat_request(body: ResponsesRequest, messages: Sequence[Mapping[str, Any]]) -> ChatRequest:
    """Return a request as a chat of some messages."""
    chat = list(messages)
    # Instructions of previous responses are not kept, as at OpenAI.
    if body.instructions:
        chat.insert(0, {"role": "system", "content": body.instructions})
    effort = None if body.reasoning is None else body.reasoning.effort
    wants_logprobs = _LOGPROBS in (body.include or ()) or body.top_logprobs is not None
    return ChatRequest.model_validate(
        {
            **sampled(body),
            "messages": with_one_system_message(chat),
            "max_completion_tokens": body.max_output_tokens,
            "stop": body.stop,
            "structured_outputs": body.structured_outputs,
            "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools or ()],
            "tool_choice": _choice(body),
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": _format(body),
            "reasoning_effort": effort,
            "logprobs": wants_logprobs,
            "top_logprobs": body.top_logprobs,
            "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
    )


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    described = {name: value for name, value in function.items() if name != "type"}
    return {"type": "function", "function": described}


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if isinstance(choice, FunctionChoice):
        return _named(choice)
    allowed = {"mode": choice.mode, "tools": [_named(each) for each in choice.tools]}
    return {"type": choice.type, "allowed_tools": allowed}


def _named(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type}
    schema = {
        "name": form.name or "",
        "schema": form.schema_,
        "strict": form.strict,
    }
    return {"type": form.type, "json_schema": schema}


class ModelResponse(TranslatedRequest):
    """A response of the model.

    Args:
        service: answers the request, and keeps the response.
        body: of the request.
        passing: the request over HTTP.
        before: the messages up to the end of the previous response.

    Raises:
        HTTPError: the request cannot be a chat.
    """

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        passing: Passing,
        before: Sequence[dict[str, Any]],
    ) -> None:
        self.request = body
        self._owner = passing.owner
        self._messages = [*before, *chat_messages(body.input)]
        super().__init__(service, chat_request(body, self._messages), passing, _NAMES)
        # Not the id of the request, which stands in logs.
        self.id = f"resp_{uuid4().hex}"
        self._numbers = count()
        passing.error_event = self._error

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {
            "type": kind,
            "sequence_number": next(self._numbers),
            **fields,
        }
        return event(data, kind)

    def _error(self, error: HTTPError) -> bytes:
        told = {
            "code": error.code,
            "message": str(error),
            "param": error.field,
        }
        return self._event("error", **told)

    def beginning(self) -> Iterator[bytes]:
        """Yield the events of a response without items."""
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def begun(self, block: Block) -> Iterator[bytes]:
        """Yield the events of a new item."""
        item = self._item(block, "in_progress")
        # The parts follow in events of their own.
        if block.kind is not BlockKind.CALL:
            item["content"] = []
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind is not BlockKind.CALL:
            place = self._place(block)
            yield self._event("response.content_part.added", **place, part=_part(block))

    def grown(
        self, block: Block, text: str, logprobs: Sequence[Mapping[str, Any]]
    ) -> Iterator[bytes]:
        """Yield the event of new text of an item."""
        fields = {**self._place(block), "delta": text}
        if block.kind is BlockKind.TEXT:
            fields["logprobs"] = list(logprobs)
        yield self._event(f"{_text_event(block)}.delta", **fields)

    def ended(self, block: Block) -> Iterator[bytes]:
        """Yield the events of a whole item."""
        place = self._place(block)
        done = f"{_text_event(block)}.done"
        if block.kind is BlockKind.CALL:
            yield self._event(done, **place, name=block.name, arguments=block.text)
        elif block.kind is BlockKind.TEXT:
            yield self._event(done, **place, text=block.text, logprobs=block.logprobs)
        else:
            yield self._event(done, **place, text=block.text)
        if block.kind is not BlockKind.CALL:
            yield self._event("response.content_part.done", **place, part=_part(block))
        item = self._item(block, self._status(block))
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def ending(self) -> Iterator[bytes]:
        """Yield the events of the end of a response."""
        yield from self._enter_text_if_empty()
        yield from self.end_block()
        response = self._finished()
        yield self._event(f"response.{response['status']}", response=response)

    def answered(self) -> dict[str, Any]:
        """Return the response with all items."""
        for _ in self._enter_text_if_empty():
            pass
        return self._finished()

    def _enter_text_if_empty(self) -> Iterator[bytes]:
        """Begin a message in an answer without text, because clients expect an item."""
        if not self.blocks:
            yield from self.enter(BlockKind.TEXT)

    def _finished(self) -> dict[str, Any]:
        """Return the whole response, and keep it."""
        is_cut = self.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        if response["store"]:
            messages = [*self._messages, self.as_message()]
            self.service.responses.keep(self._owner, response, messages)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        has_ended = status != "in_progress"
        is_cut = status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if has_ended else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self.model_name,
            "output": [self._item(block, self._status(block)) for block in self.blocks],
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "usage": self._tokens() if has_ended else None,
            **_settings(self.request),
            "store": self._is_kept,
        }

    @property
    def _is_kept(self) -> bool:
        return self.request.store is not False and self.service.settings.max_kept_bytes > 0

    def _status(self, block: Block) -> str:
        """Return the status of a block that does not grow any more."""
        is_cut = self.finish_reason == "length" and block is self.blocks[-1]
        return "incomplete" if is_cut else "completed"

    def _tokens(self) -> dict[str, Any]:
        read = self.record["prompt_tokens"]
        written = self.record["completion_tokens"]
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self.count_reasoning()},
            "total_tokens": read + written,
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind is BlockKind.CALL:
            named = {"call_id": block.call_id, "name": block.name}
            return {
                **item,
                "type": "function_call",
                **named,
                "arguments": block.text,
            }
        if block.kind is BlockKind.REASONING:
            return {
                **item,
                "type": "reasoning",
                "summary": [],
                "content": [_part(block)],
            }
        return {
            **item,
            "type": "message",
            "role": "assistant",
            "content": [_part(block)],
        }

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self.id[-24:]}{block.index}"

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}


def _settings(body: ResponsesRequest) -> dict[str, Any]:
    """Return the settings of a request, as a response tells them."""
    form = None if body.text is None else body.text.format
    effort = None if body.reasoning is None else body.reasoning.effort
    choice = body.tool_choice or "auto"
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": _told_format(form)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _text_event(block: Block) -> str:
    if block.kind is BlockKind.CALL:
        return "response.function_call_arguments"
    return f"response.{_part_type(block)}"


def _part_type(block: Block) -> str:
    return "output_text" if block.kind is BlockKind.TEXT else "reasoning_text"


def _part(block: Block) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _part_type(block), "text": block.text}
    if block.kind is BlockKind.TEXT:
        part |= {"annotations": [], "logprobs": list(block.logprobs)}
    return part


def _told_format(form: TextFormat | None) -> dict[str, Any]:
    if form is None:
        return {"type": "text"}
    return form.model_dump(by_alias=True, exclude_none=True)
