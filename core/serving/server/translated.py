"""``TranslatedRequest``: a request of another interface, as a chat; its answer as blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import dropwhile
from typing import Any

from opgraft.serving.outputs import RequestOutput
from opgraft.serving.server.chat import Chat
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.protocol import ChatRequest, SamplingFields
from opgraft.serving.server.service import Service


class BlockKind(Enum):
    """A part of an answer."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass
class Block:
    """A part of an answer: reasoning, text, or one call.

    Attributes:
        kind: of the part.
        index: the place in the answer.
        text: so far; of a call, the arguments.
        name: of the function of a call.
        call_id: of a call.
        logprobs: of the tokens of a text, in OpenAI's form.
    """

    kind: BlockKind
    index: int
    text: str = ""
    name: str = ""
    call_id: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


def called(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    """Return a call of a function, as messages of chats have it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def joined(content: str | Sequence[Any]) -> str:
    """Return a text that is given whole or in parts."""
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content
    return "\n".join(part.text for part in parts)


def with_one_system_message(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages whose first system messages are one, because templates take one."""
    rest = list(dropwhile(_is_of_operator, messages))
    texts = [message["content"] for message in messages[: len(messages) - len(rest)]]
    if not texts:
        return rest
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def _is_of_operator(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def spelled(
    rows: list[dict[str, Any]], text: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the tokens that spell a text, and the rows behind them.

    All rows, if the tokens do not spell the text: a token may be a part of a character.
    """
    written = b"".join(bytes(row["bytes"]) for row in rows)
    sought = text.encode("utf-8", "replace")
    begin = written.find(sought)
    if begin < 0:
        return rows, []
    end = begin + len(sought)
    place = 0
    spelling: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        if place >= end:
            return spelling, rows[number:]
        place += len(row["bytes"])
        if place > begin:
            spelling.append(row)
    return spelling, []


def sampled(body: SamplingFields) -> dict[str, Any]:
    """Return the fields that a request shares with chats."""
    return {name: getattr(body, name) for name in SamplingFields.model_fields}


class TranslatedRequest(Chat):
    """A request of another interface, as a chat, and the form of its answer.

    Args:
        service: answers the request.
        body: the request as a chat.
        passing: the request over HTTP.
        names: parts of names in chats → parts in the interface, for errors.

    Attributes:
        blocks: of the answer so far. The last block may still grow.
        finish_reason: of the chat, None before the end.
        stop_reason: the text or token that ended the answer.
    """

    def __init__(
        self, service: Service, body: ChatRequest, passing: Passing, names: Mapping[str, str]
    ) -> None:
        passing.names = names
        super().__init__(service, body, passing)
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._pending: list[dict[str, Any]] = []

    @abstractmethod
    def begun(self, block: Block) -> Iterator[bytes]:
        """Yield the events of a new block without text."""

    @abstractmethod
    def grown(
        self, block: Block, text: str, logprobs: Sequence[Mapping[str, Any]]
    ) -> Iterator[bytes]:
        """Yield the events of new text of a block."""

    @abstractmethod
    def ended(self, block: Block) -> Iterator[bytes]:
        """Yield the events of a whole block."""

    @abstractmethod
    def answered(self) -> dict[str, Any]:
        """Return the answer with all blocks."""

    def written(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the events of a chunk of the chat."""
        (choice,) = chunk["choices"]
        yield from self._read(choice, choice["delta"])

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer."""
        (output,) = outputs
        (answer,) = output.outputs
        choice = self.choice(0, output, answer)
        # A whole message has the form of one large delta. Nobody reads the events.
        for _ in self._read(choice, choice["message"]):
            pass
        return self.answered()

    def _read(self, choice: Mapping[str, Any], delta: Mapping[str, Any]) -> Iterator[bytes]:
        """Read a delta into blocks, and yield the events."""
        # Tokens that are part of a character come before its text.
        self._pending += (choice["logprobs"] or {}).get("content", ())
        reasoning = delta.get("reasoning_content")
        if reasoning:
            _, self._pending = spelled(self._pending, reasoning)
            yield from self.enter(BlockKind.REASONING)
            yield from self._grow(reasoning, ())
        text = delta.get("content")
        if text:
            logprobs, self._pending = spelled(self._pending, text)
            yield from self.enter(BlockKind.TEXT)
            yield from self._grow(text, logprobs)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            # Only the first delta of a call has an id.
            if "id" in call:
                yield from self.enter(BlockKind.CALL, function["name"], call["id"])
            yield from self._grow(function["arguments"], ())
        self.finish_reason = choice["finish_reason"]
        self.stop_reason = choice.get("stop_reason")

    def enter(self, kind: BlockKind, name: str = "", call_id: str = "") -> Iterator[bytes]:
        """Go on with the last block, or begin another one."""
        # Each call is a block of its own.
        if self.blocks and self.blocks[-1].kind is kind and kind is not BlockKind.CALL:
            return
        yield from self.end_block()
        block = Block(kind, len(self.blocks), name=name, call_id=call_id)
        self.blocks.append(block)
        yield from self.begun(block)

    def _grow(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        block = self.blocks[-1]
        block.text += text
        block.logprobs += logprobs
        if text:
            yield from self.grown(block, text, logprobs)

    def end_block(self) -> Iterator[bytes]:
        """Yield the events of the end of the last block, if there is one."""
        if self.blocks:
            yield from self.ended(self.blocks[-1])

    def as_message(self) -> dict[str, Any]:
        """Return the answer as a message of a chat."""
        calls = []
        texts = {BlockKind.REASONING: "", BlockKind.TEXT: ""}
        for block in self.blocks:
            if block.kind is BlockKind.CALL:
                calls.append(called(block.name, block.text, block.call_id))
            else:
                texts[block.kind] += block.text
        return {
            "role": "assistant",
            "content": texts[BlockKind.TEXT],
            "reasoning_content": texts[BlockKind.REASONING] or None,
            "tool_calls": calls or None,
        }

    def count_reasoning(self) -> int:
        """Return the tokens of the reasoning, without the markers."""
        encode = self.service.tokenizer.encode
        texts = [block.text for block in self.blocks if block.kind is BlockKind.REASONING]
        return sum(len(encode(text, add_special_tokens=False)) for text in texts)
