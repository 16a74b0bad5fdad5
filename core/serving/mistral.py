"""``MistralFormat``: chats of Mistral's models, which the library mistral-common writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from opgraft.base.text import described
from opgraft.base.timeline import phase
from opgraft.errors import CheckpointError, InputError, RequestError
from opgraft.models.extras import import_extra
from opgraft.serving.chat_format import (
    ChatFormat,
    UserText,
    arguments_text,
    content_text,
    functions_of,
    plain_messages,
    text_to_continue,
)
from opgraft.serving.outputs import CompletionOutput

TEKKEN = "tekken.json"
"""The file of a vocabulary since July 2024. Earlier ones have names such as
``tokenizer.model.v3``."""

_CALL_ID = re.compile("[a-zA-Z0-9]{9}")
"""Ids that the format can write."""

_BEGIN_THINK = "[THINK]"
_END_THINK = "[/THINK]"
_ALWAYS = ("<s>", "</s>", "[INST]", "[/INST]")
"""Markers of every version. In the first one, some of them are plain text."""

_FIRST_WITH_TOOLS = 2
_FIRST_WITH_TEXT_BESIDE_CALLS = 5
_FIRST_WITH_ARGS = 11
_FIRST_WITH_EFFORT = 15
"""Versions of the format."""


def vocabulary_in(folder: Path) -> Path | None:
    """Return the file of a vocabulary in a folder, the latest one, or None."""
    tekken = folder / TEKKEN
    if tekken.is_file():
        return tekken
    return max(folder.glob("tokenizer.model.v*"), key=_version_of_file, default=None)


def _version_of_file(file: Path) -> int:
    digits = re.match("[0-9]+", file.name.removeprefix("tokenizer.model.v"))
    return int(digits[0]) if digits else 0


class MistralFormat(ChatFormat):
    """The format of Mistral's models, in the version that the vocabulary states.

    Args:
        file: the vocabulary.

    Raises:
        InputError: the library, or sentencepiece for older vocabularies, is not installed.
        CheckpointError: the file cannot be read.
    """

    def __init__(self, file: Path) -> None:
        tokenizers = import_extra("mistral_common.tokens.tokenizers.mistral", "formats")
        requests = import_extra("mistral_common.protocol.instruct.request", "formats")
        policies = import_extra("mistral_common.tokens.tokenizers.base", "formats")
        self._leaves_out = policies.SpecialTokenPolicy.IGNORE
        self._request = requests.ChatCompletionRequest
        try:
            self._tokenizer = tokenizers.MistralTokenizer.from_file(str(file))
            raw = self._tokenizer.instruct_tokenizer.tokenizer
            self._version = int(re.sub(r"v(\d+).*", r"\1", raw.version.value))
        # The library imports sentencepiece only for a vocabulary of that kind.
        except ImportError as error:
            raise InputError(
                f"{file} is a vocabulary of sentencepiece, which cannot be imported: pip install "
                "sentencepiece"
            ) from error
        # The library raises plain exceptions, and damaged values lead to nearly any error.
        except Exception as error:
            raise CheckpointError(
                f"{file} is no vocabulary that mistral-common can read: {described(error)}. "
                "Download it again"
            ) from error
        self._raw = raw
        # Models that reason have the marker, and other vocabularies cannot write it.
        self._thinks = getattr(self._tokenizer.instruct_tokenizer, "BEGIN_THINK", None) is not None

    @property
    def source(self) -> str:
        signs = []
        if self._version >= _FIRST_WITH_TOOLS:
            signs += ["tools", "[TOOL_CALLS]"]
        if self._version >= _FIRST_WITH_ARGS:
            signs.append("[ARGS]")
        if self._thinks:
            signs.append(_BEGIN_THINK)
        return " ".join(signs)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        texts = (*_ALWAYS, *self.source.split())
        known = filter(self._raw.is_special, texts)
        return {text: self._raw.get_special_token(text) for text in known}

    def user_text(self, prompt: Sequence[int]) -> UserText:
        if not self._thinks:
            return super().user_text(prompt)
        begin = self._raw.get_special_token(_BEGIN_THINK)
        end = self._raw.get_special_token(_END_THINK)
        return _TextWithoutThoughts(begin, end, self._plain_text)

    def _plain_text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens."""
        return str(self._raw.decode(list(ids), self._leaves_out))

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
        """Return the token ids of a chat. The format has no text before an answer."""
        chat = plain_messages(messages)
        try:
            given: dict[str, Any] = {"messages": list(self._written(chat))}
            if continue_final_message:
                text_to_continue(chat[-1])
                given["messages"][-1]["prefix"] = True
            if tools:
                given["tools"] = [_tool(function) for function in functions_of(tools)]
            effort = (values or {}).get("reasoning_effort")
            # Older versions of the format have no efforts.
            if effort is not None and self._version >= _FIRST_WITH_EFFORT:
                given["reasoning_effort"] = effort
            request = self._request.model_validate(given)
            return list(self._tokenizer.encode_chat_completion(request).tokens)
        except RequestError:
            raise
        # The library raises plain exceptions, those of pydantic and failed assertions.
        except Exception as error:
            raise RequestError(
                f"mistral-common cannot write these {len(chat)} messages: {described(error)}. "
                "Change the messages, or pass a prompt as text."
            ) from error

    def _written(self, chat: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield messages as the library takes them."""
        called: list[dict[str, Any]] = []
        for place, message in enumerate(chat):
            role = message.get("role")
            text = content_text(message)
            if role == "tool":
                # The results of calls come in the order of the calls.
                expected = called.pop(0) if called else {"id": _call_id("", place, 0)}
                given = message.get("tool_call_id")
                identity = _call_id(given, place, 0) if given else expected["id"]
                yield {"role": role, "content": text, "tool_call_id": identity}
            elif role == "assistant":
                written = self._answer(message, text, place)
                called = list(written.get("tool_calls", ()))
                # An answer without content says nothing, and the library refuses it.
                if len(written) > 1:
                    yield written
            else:
                yield {"role": "system" if role == "developer" else role, "content": text}

    def _answer(self, message: Mapping[str, Any], text: str, place: int) -> dict[str, Any]:
        """Return an answer of the model: reasoning, text and calls."""
        written: dict[str, Any] = {"role": "assistant"}
        calls = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            calls.append(_call(call, place, number))
        if calls:
            written["tool_calls"] = calls
        # Older versions have no way to write both, and calls matter more.
        takes_text = not calls or self._version >= _FIRST_WITH_TEXT_BESIDE_CALLS
        if text and takes_text:
            written["content"] = text
        reasoning = message.get("reasoning_content")
        if reasoning and self._thinks:
            chunks = [{"type": "thinking", "thinking": str(reasoning), "closed": True}]
            if "content" in written:
                chunks.append({"type": "text", "text": text})
            written["content"] = chunks
        return written


class _TextWithoutThoughts(UserText):
    """Leaves the thoughts out of an answer's text, in which their markers are not shown.

    Args:
        begin: the token before a thought.
        end: the token behind a thought.
        text_of: returns the text of token ids, as the answer shows them.
    """

    def __init__(self, begin: int, end: int, text_of: Callable[[Sequence[int]], str]) -> None:
        self._begin = begin
        self._end = end
        self._text_of = text_of
        self._count = 0
        # Characters of the answer's text before and behind each thought; an open one has no end.
        self._thoughts: list[tuple[int, int | None]] = []

    def read(self, answer: CompletionOutput) -> str:
        ids = answer.token_ids
        for place in range(self._count, len(ids)):
            is_open = bool(self._thoughts) and self._thoughts[-1][1] is None
            # Markers are rare, so the text before one is made anew for each.
            if ids[place] == self._begin and not is_open:
                begin = len(self._text_of(ids[:place]))
                self._thoughts.append((begin, None))
            elif ids[place] == self._end and is_open:
                first, _ = self._thoughts.pop()
                end = len(self._text_of(ids[:place]))
                self._thoughts.append((first, end))
        self._count = len(ids)
        shown = []
        behind: int | None = 0
        for first, last in self._thoughts:
            shown.append(answer.text[behind:first])
            behind = last
        if behind is not None:
            shown.append(answer.text[behind:])
        return "".join(shown)


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": function.get("name"),
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {},
        },
    }


def _call(call: Mapping[str, Any], place: int, number: int) -> dict[str, Any]:
    function = {"name": call["function"].get("name"), "arguments": arguments_text(call)}
    identity = _call_id(call.get("id"), place, number)
    return {"id": identity, "type": "function", "function": function}


def _call_id(given: Any, place: int, number: int) -> str:
    """Return an id that the format can write. Equal ids of a client stay equal."""
    if isinstance(given, str) and _CALL_ID.fullmatch(given):
        return given
    # Without an id of the client, the place of the call makes ids differ.
    source = str(given or (place, number))
    return sha256(source.encode()).hexdigest()[:9]
