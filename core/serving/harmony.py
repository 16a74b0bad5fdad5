"""``HarmonyFormat``: chats of gpt-oss, which the library openai-harmony writes and reads."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

from opgraft.base.text import described
from opgraft.base.timeline import phase
from opgraft.errors import CheckpointError, RequestError
from opgraft.models.extras import import_extra
from opgraft.serving.chat_format import (
    ChatFormat,
    UserText,
    arguments_text,
    content_text,
    functions_of,
    plain_messages,
    text_to_continue,
    texts_of,
)
from opgraft.serving.harmony_limits import expect_quick
from opgraft.serving.outputs import CompletionOutput

VOCABULARY = "o200k_base.tiktoken"
"""The name that the library has for its vocabulary."""

RETURN = 200_002
CONSTRAIN = 200_003
CHANNEL = 200_005
START = 200_006
END = 200_007
MESSAGE = 200_008
CALL = 200_012
MARKERS = MappingProxyType(
    {
        "<|return|>": RETURN,
        "<|constrain|>": CONSTRAIN,
        "<|channel|>": CHANNEL,
        "<|start|>": START,
        "<|end|>": END,
        "<|message|>": MESSAGE,
        "<|call|>": CALL,
    }
)
"""Tokens of the format by their texts. A tokenizer with other ids is of another family."""

ANALYSIS = "analysis"
"""The channel of reasoning."""

NAMESPACE = "functions."
"""Stands before the name of a function that is called."""

_FOLDER_OF_LIBRARY = "TIKTOKEN_ENCODINGS_BASE"
"""The variable by which the library finds its vocabulary. Without it, the library downloads."""

_setting_variable = Lock()

_EFFORTS = MappingProxyType(
    {
        "none": "Low",
        "minimal": "Low",
        "low": "Low",
        "medium": "Medium",
        "high": "High",
        "xhigh": "High",
        "max": "High",
    }
)
"""Efforts of requests → efforts of the format, which has no thinking without effort."""


@dataclass
class AnswerPart:
    """A message in an answer.

    Attributes:
        channel: such as ``analysis`` for reasoning, or ``final``; None without a channel.
        recipient: such as ``functions.weather`` for a call; None for the user.
        text: so far.
    """

    channel: str | None
    recipient: str | None
    text: str = ""


class HarmonyFormat(ChatFormat):
    """The format of gpt-oss.

    Args:
        file: the vocabulary, named ``VOCABULARY``.

    Raises:
        InputError: the library is not installed.
        CheckpointError: the file is another vocabulary. The library compares its SHA-256.
    """

    def __init__(self, file: Path) -> None:
        self._library = import_extra("openai_harmony", "formats")
        try:
            with _folder_for_library(file.parent):
                self._encoding = self._library.load_harmony_encoding("HarmonyGptOss")
        except self._library.HarmonyError as error:
            raise CheckpointError(
                f"{file} is not the vocabulary of gpt-oss: {described(error)}. Take the file "
                f"{VOCABULARY} that OpenAI publishes, unchanged"
            ) from error

    @property
    def source(self) -> str:
        return f"tools {' '.join(MARKERS)}"

    @property
    def ends(self) -> frozenset[int]:
        return frozenset({RETURN, CALL})

    @phase("template")
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> list[int]:
        chat = plain_messages(messages)
        try:
            given = values or {}
            expect_quick(texts_of([messages, tools, given.get("model_identity")]))
            written = [*self._beginning(chat, tools, given), *self._written(chat)]
            conversation = self._library.Conversation.from_messages(written)
            if continue_final_message:
                text_to_continue(chat[-1])
                # Without the token that ends the last message.
                return list(self._encoding.render_conversation(conversation)[:-1])
            if not add_generation_prompt:
                return list(self._encoding.render_conversation(conversation))
            model = self._library.Role.ASSISTANT
            return list(self._encoding.render_conversation_for_completion(conversation, model))
        except RequestError:
            raise
        # The library raises plain exceptions.
        except Exception as error:
            raise RequestError(
                f"openai-harmony cannot write these {len(chat)} messages: {described(error)}. "
                "Change the messages, or pass a prompt as text."
            ) from error

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return MARKERS

    def user_text(self, prompt: Sequence[int]) -> UserText:
        return _MessagesForUser(self.parser(prompt))

    def parser(self, prompt: Sequence[int]) -> HarmonyParser:
        """Return a parser of the answer to a prompt."""
        return HarmonyParser(self._library, self._encoding, prompt)

    def _beginning(
        self,
        chat: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any],
    ) -> Iterator[Any]:
        """Yield the message about the model, and the message with instructions and functions."""
        library = self._library
        system = library.SystemContent.new()
        system = system.with_reasoning_effort(library.ReasoningEffort(_effort(values)))
        system = system.with_conversation_start_date(datetime.date.today().isoformat())
        if values.get("model_identity"):
            system = system.with_model_identity(str(values["model_identity"]))
        yield library.Message.from_role_and_content(library.Role.SYSTEM, system)

        written = [content_text(message) for message in chat[: _instructions(chat)]]
        instructions = "\n\n".join(written)
        # Many short texts may make a long run together.
        expect_quick([instructions])
        developer = library.DeveloperContent.new()
        if written:
            developer = developer.with_instructions(instructions)
        described_functions = []
        for function in functions_of(tools):
            # The library takes no None for the description.
            text = function.get("description") or ""
            parameters = function.get("parameters")
            tool = library.ToolDescription.new(function["name"], text, parameters)
            described_functions.append(tool)
        if described_functions:
            developer = developer.with_function_tools(described_functions)
        if written or described_functions:
            yield library.Message.from_role_and_content(library.Role.DEVELOPER, developer)

    def _written(self, chat: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
        """Yield the messages of a chat behind the first instructions."""
        library = self._library
        names: dict[Any, str] = {}
        last_called = "unknown"
        for message in chat[_instructions(chat) :]:
            role = message.get("role")
            if role in ("system", "developer"):
                content = library.DeveloperContent.new().with_instructions(content_text(message))
                yield library.Message.from_role_and_content(library.Role.DEVELOPER, content)
            elif role == "tool":
                # The format names the function of a result, and has no ids of calls.
                known = names.get(message.get("tool_call_id"), last_called)
                yield self._result(message.get("name") or known, content_text(message))
            elif role == "assistant":
                for call in message.get("tool_calls") or ():
                    last_called = call["function"]["name"]
                    names[call.get("id")] = last_called
                yield from self._answer(message)
            else:
                yield library.Message.from_role_and_content(
                    library.Role(role), content_text(message)
                )

    def _answer(self, message: Mapping[str, Any]) -> Iterator[Any]:
        """Yield an answer of the model: reasoning, text and calls."""
        library = self._library
        calls = message.get("tool_calls") or ()

        def said(text: str, channel: str) -> Any:
            written = library.Message.from_role_and_content(library.Role.ASSISTANT, text)
            return written.with_channel(channel)

        if message.get("reasoning_content"):
            yield said(str(message["reasoning_content"]), ANALYSIS)
        if content_text(message):
            # A text beside calls tells the user about the calls.
            yield said(content_text(message), "commentary" if calls else "final")
        for call in calls:
            written = said(arguments_text(call), "commentary").with_content_type("json")
            yield written.with_recipient(f"{NAMESPACE}{call['function']['name']}")

    def _result(self, name: str, text: str) -> Any:
        """Return the result of a function."""
        library = self._library
        author = library.Author.new(library.Role.TOOL, f"{NAMESPACE}{name}")
        written = library.Message.from_author_and_content(author, text)
        return written.with_channel("commentary").with_recipient("assistant")


class HarmonyParser:
    """Reads the messages of one growing answer from its tokens.

    Args:
        library: openai-harmony.
        encoding: of the library.
        prompt: token ids before the answer. The end holds the beginning of the first message.

    Attributes:
        parts: messages so far. The last one may still grow.
    """

    def __init__(self, library: Any, encoding: Any, prompt: Sequence[int]) -> None:
        self.parts: list[AnswerPart] = []
        # Characters of the last message before its last token.
        self._length_before = 0
        self._encoding = encoding
        self._failure = library.HarmonyError
        self._parser = library.StreamableParser(encoding, None, strict=False)
        self._is_open = False
        # Tokens of a header. After a token that the library cannot read, every further token.
        self._unread: list[int] = []
        self._failed = False
        self._count = 0
        header = _header(prompt)
        if header is None:
            header = encoding.encode("<|start|>assistant", allowed_special="all")
        for token in header:
            self._take(token)
        self._unread.clear()

    def read(self, tokens: Sequence[int], ended: bool) -> None:
        """Read on.

        Args:
            tokens: of the answer so far.
            ended: the answer is whole.
        """
        for token in tokens[self._count :]:
            self._take(token)
        self._count = len(tokens)
        if ended:
            self._show_rest()

    def up_to_stop(self, text: str, stop: str, keeps_stop: bool) -> str:
        """Return the text of the last message up to the stop string that ended the answer.

        This is the first stop string that ends in the last token.
        """
        # The stop string may begin before the last token.
        begin = max(self._length_before - len(stop) + 1, 0)
        place = text.find(stop, begin)
        if place < 0:
            return text
        end = place + len(stop) if keeps_stop else place
        return text[:end]

    def _take(self, token: int) -> None:
        if self._failed:
            self._unread.append(token)
            return
        try:
            self._parser.process(token)
        except self._failure:
            self._failed = True
            self._unread.append(token)
            return
        if not self._is_open:
            self._unread.append(token)
        if token == MESSAGE and not self._is_open:
            self._is_open = True
            self._unread.clear()
            parser = self._parser
            self.parts.append(AnswerPart(parser.current_channel, parser.current_recipient))
            self._length_before = 0
        elif self._is_open and token in (END, RETURN, CALL):
            self._is_open = False
        elif self._is_open:
            self._length_before = len(self.parts[-1].text)
            self.parts[-1].text += self._parser.last_content_delta or ""

    def _show_rest(self) -> None:
        """Show the text of tokens that belong to no message."""
        ordinary = [token for token in self._unread if token not in MARKERS.values()]
        rest = self._encoding.decode(ordinary)
        # The answer was cut within a header.
        begun = START in self._unread or CHANNEL in self._unread or rest.startswith(" to=")
        is_header = begun and not self._failed
        if rest and not is_header:
            self.parts.append(AnswerPart(None, None, rest))
            self._length_before = 0
        self._unread.clear()


class _MessagesForUser(UserText):
    """Reads the messages of an answer that are no reasoning."""

    def __init__(self, parser: HarmonyParser) -> None:
        self._parser = parser

    def read(self, answer: CompletionOutput) -> str:
        self._parser.read(answer.token_ids, answer.finished)
        said = [part.text for part in self._parser.parts if part.channel != ANALYSIS]
        if said and isinstance(answer.stop_reason, str):
            said[-1] = self._parser.up_to_stop(said[-1], answer.stop_reason, False)
        return "\n".join(filter(None, said))


@contextmanager
def _folder_for_library(folder: Path) -> Iterator[None]:
    """Tell the library the folder of its vocabulary, so that it downloads nothing."""
    with _setting_variable:
        former = os.environ.get(_FOLDER_OF_LIBRARY)
        os.environ[_FOLDER_OF_LIBRARY] = str(folder)
        try:
            yield
        finally:
            if former is None:
                del os.environ[_FOLDER_OF_LIBRARY]
            else:
                os.environ[_FOLDER_OF_LIBRARY] = former


def _header(prompt: Sequence[int]) -> list[int] | None:
    """Return the tokens from the last beginning of a message, up to its text.

    Empty, if the last message of the prompt has ended. None, if the prompt has no message.
    """
    for place in range(len(prompt) - 1, -1, -1):
        if prompt[place] in (END, RETURN, CALL):
            return []
        if prompt[place] == START:
            header = list(prompt[place:])
            # A continued message has text behind its header, which is no part of the answer.
            return header[: header.index(MESSAGE) + 1] if MESSAGE in header else header
    return None


def _instructions(chat: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of first messages that are instructions."""
    for place, message in enumerate(chat):
        if message.get("role") not in ("system", "developer"):
            return place
    return len(chat)


def _effort(values: Mapping[str, Any]) -> str:
    given = values.get("reasoning_effort") or "medium"
    if given not in _EFFORTS:
        raise RequestError(
            f"reasoning_effort is {given!r:.40}: give one of {', '.join(_EFFORTS)}",
            "reasoning_effort",
        )
    return _EFFORTS[given]
