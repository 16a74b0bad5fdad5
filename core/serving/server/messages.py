"""``/v1/messages``: Anthropic's interface for chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opgraft.serving.server.chat import Chat
from opgraft.serving.server.chat_messages import THINKING_BUDGET, arguments_of
from opgraft.serving.server.messages_protocol import (
    CallBlock,
    CountRequest,
    InputMessage,
    MessagesRequest,
    OutputConfig,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
)
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.protocol import ChatRequest
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
    "max_completion_tokens": "max_tokens",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "function.parameters": "input_schema",
    "stop": "stop_sequences",
}
"""Parts of names in chats → parts of names here."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def chat_request(body: CountRequest) -> ChatRequest:
    """Return a request as a chat."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": joined(body.system)})
    for message in body.messages:
        messages += _chat_messages(message)
    output = body.output_config or OutputConfig()
    values = body.chat_template_kwargs or {}
    # Qwen's and other templates have a value of this name.
    if body.thinking is not None:
        values = {"enable_thinking": body.thinking.type != "disabled", **values}
        # Anthropic's clients have to send it, so a template without a place for it is no error.
        if body.thinking.budget_tokens is not None:
            values = {THINKING_BUDGET: body.thinking.budget_tokens, **values}
    return ChatRequest.model_validate(
        {
            **_sampling(body),
            "messages": with_one_system_message(messages),
            "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools or ()],
            "tool_choice": _choice(body),
            "parallel_tool_calls": _may_call_several(body),
            "response_format": _format(output),
            "reasoning_effort": output.effort,
            # The model goes on with a message that the client has begun.
            "continue_final_message": _is_begun(messages),
            "chat_template_kwargs": values,
        }
    )


def _sampling(body: CountRequest) -> dict[str, Any]:
    """Return the fields of sampling, if the request wants an answer."""
    if not isinstance(body, MessagesRequest):
        return {"model": body.model}
    return {**sampled(body), "max_tokens": body.max_tokens, "stop": body.stop_sequences}


def _may_call_several(body: CountRequest) -> bool:
    return body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use


def _chat_messages(message: InputMessage) -> Iterator[dict[str, Any]]:
    """Yield a message as messages of a chat: results of calls first, then the rest."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts = []
    calls = []
    reasoning = []
    results = False
    for block in message.content:
        if isinstance(block, ResultBlock):
            results = True
            content = joined(block.content or "")
            # Chats have no field for it.
            if block.is_error:
                content = f"Error: {content}"
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": content,
            }
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            reasoning.append(block.thinking)
        elif isinstance(block, CallBlock):
            calls.append(called(block.name, block.input, block.id))
    rest: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if reasoning:
        rest["reasoning_content"] = "\n".join(reasoning)
    if calls:
        rest["tool_calls"] = calls
    if texts or calls or not results:
        yield rest


def _is_begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    if not messages:
        return False
    last = messages[-1]
    return last["role"] == "assistant" and "tool_calls" not in last


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _choice(body: CountRequest) -> Any:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    return {"type": "function", "function": {"name": choice.name or ""}}


def _format(output: OutputConfig) -> dict[str, Any] | None:
    if output.format is None:
        return None
    schema = {"name": "answer", "schema": output.format.schema_}
    return {"type": "json_schema", "json_schema": schema}


async def count_tokens(service: Service, body: CountRequest, passing: Passing) -> dict[str, int]:
    """Return the number of tokens of the prompt of a request.

    Raises:
        HTTPError: the request names another model, or cannot be a chat.
        RequestError: the template refuses the messages.
    """
    passing.names = _NAMES
    service.expect_model(body.model)
    await service.check()
    chat = Chat(service, chat_request(body), passing)
    return {"input_tokens": await service.prepare(chat.count)}


class Message(TranslatedRequest):
    """A message of the model.

    Args:
        service: answers the request.
        body: of the request.
        passing: the request over HTTP.

    Raises:
        HTTPError: the request cannot be a chat.
    """

    def __init__(self, service: Service, body: MessagesRequest, passing: Passing) -> None:
        super().__init__(service, chat_request(body), passing, _NAMES)
        self.id = f"msg_{passing.id}"

    def beginning(self) -> Iterator[bytes]:
        """Yield the event of a message without blocks."""
        yield _event("message_start", message=self.answered())

    def begun(self, block: Block) -> Iterator[bytes]:
        """Yield the event of a new block."""
        content = _content_of_block(block)
        # The input follows in parts.
        if block.kind is BlockKind.CALL:
            content["input"] = {}
        yield _event("content_block_start", index=block.index, content_block=content)

    def grown(
        self, block: Block, text: str, logprobs: Sequence[Mapping[str, Any]]
    ) -> Iterator[bytes]:
        """Yield the event of new text of a block."""
        kind, name = _DELTAS[block.kind]
        delta = {"type": kind, name: text}
        yield _event("content_block_delta", index=block.index, delta=delta)

    def ended(self, block: Block) -> Iterator[bytes]:
        """Yield the event of a whole block."""
        yield _event("content_block_stop", index=block.index)

    def ending(self) -> Iterator[bytes]:
        """Yield the events of the end of a message."""
        yield from self.end_block()
        yield _event("message_delta", delta=self._end(), usage=self._tokens())
        yield _event("message_stop")

    def answered(self) -> dict[str, Any]:
        """Return the message with all blocks."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model_name,
            "content": [_content_of_block(block) for block in self.blocks],
            **self._end(),
            "usage": self._tokens(),
        }

    def _end(self) -> dict[str, Any]:
        """Return the reason of the end, null before the end."""
        if self.finish_reason == "stop" and isinstance(self.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop_reason}
        reason = _STOP_REASONS.get(self.finish_reason or "")
        return {"stop_reason": reason, "stop_sequence": None}

    def _tokens(self) -> dict[str, Any]:
        # Anthropic counts cached tokens beside the input, and OpenAI within it.
        return {
            "input_tokens": self.record["prompt_tokens"] - self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
            "output_tokens": self.record["completion_tokens"],
        }


_DELTAS = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}
"""Kind of a block → the type of its deltas, and the field with the text."""


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _content_of_block(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {
            "type": "thinking",
            "thinking": block.text,
            "signature": "",
        }
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": block.text}
    called = {"id": block.call_id, "name": block.name}
    return {
        "type": "tool_use",
        **called,
        "input": arguments_of(block.text),
    }
