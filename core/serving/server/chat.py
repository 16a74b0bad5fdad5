"""``/v1/chat/completions``: answers to chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opgraft.errors import HTTPError
from opgraft.serving.outputs import CompletionOutput, Logprob, RequestOutput
from opgraft.serving.server import sampling
from opgraft.serving.server.answer_formats import WantedAnswer, answer_format
from opgraft.serving.server.answer_readers import AnswerReader
from opgraft.serving.server.call_reader import WrittenCall
from opgraft.serving.server.chat_messages import (
    THINKING_BUDGET,
    expect_allowed,
    for_template,
    template_values,
)
from opgraft.serving.server.forms import OF_OPENAI
from opgraft.serving.server.generating import Generating
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.protocol import ChatRequest
from opgraft.serving.server.service import Service
from opgraft.serving.server.streams import News, finite, likeliest, token_text
from opgraft.serving.server.tools import NAMES_OF_OLDER_FORM, Tools, with_tools


class Chat(Generating[ChatRequest]):
    """A chat, and the form of its answer."""

    prefix = "chatcmpl"
    operation = "chat"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"

    def __init__(self, service: Service, body: ChatRequest, passing: Passing) -> None:
        super().__init__(service, with_tools(body), passing)
        self._is_older_form = bool(body.functions)
        if self._is_older_form:
            passing.names = NAMES_OF_OLDER_FORM
        inputs = service.llm.engine.inputs
        tokenizer = inputs.expect_tokenizer()
        # A template of the request takes the place of the library.
        written = inputs.chat_format if body.chat_template is None else inputs.chat_template
        template = self._template(written.source)
        self._expect_budget(template)
        self.tools = Tools(self.body, template)
        self._expect_effect()
        self._expect_json_beside_tools()
        wanted = WantedAnswer(self.tools, self.form, template, tokenizer.special_token)
        self._format = answer_format(written, wanted)
        self._held = self._format.structured_output()
        if self.tools.forced is not None:
            self.grammar_field = self.tools.forced_field
        elif self.tools.strict:
            self.grammar_field = "tools"
        self._told: dict[int, _SentCharacters] = {}
        self._prompt_text = ""

    def _expect_json_beside_tools(self) -> None:
        """Refuse a form that is no JSON, if the answer may be a call in place of the form.

        Raises:
            HTTPError: the request has such a form.
        """
        may_call = self.tools.functions is not None and self.tools.forced is None
        if not may_call or self.form is None or self.form.spec.get("json") is not None:
            return
        field = self.form.field
        raise HTTPError(
            400,
            f"{field} stands beside tools, and an answer that may be a call can be held to JSON "
            "alone: give a JSON schema, or leave tools out",
            field=field,
            code="unsupported_value",
        )

    def _expect_effect(self) -> None:
        """Refuse a form of vLLM beside a forced call.

        Clients send OpenAI's ``response_format`` beside every choice of tools. OpenAI applies that
        form to answers without a call only.

        Raises:
            HTTPError: the answer must be a call, and cannot have the form.
        """
        if self.form is None or self.tools.forced is None:
            return
        field = self.form.field
        if field == OF_OPENAI:
            return
        raise HTTPError(
            400,
            f"{field} stands beside a tool_choice that forces a call, and the answer cannot have "
            "both forms: leave one of the two out",
            field=field,
            code="unsupported_value",
        )

    async def prompts(self) -> list[list[int]]:
        """Return the token ids of the chat in the template."""
        sampling.expect_answers(self.body, 1, self.service)
        return [await self.service.llm.prepare(self._tokens_of_prompt)]

    def count(self) -> int:
        """Return the number of tokens of the prompt, which may exceed the context."""
        prompt = self._rendered()
        if not isinstance(prompt, str):
            return len(prompt)
        self.service.expect_characters(prompt, self.prompt_field)
        return len(self.service.tokenizer.encode(prompt, add_special_tokens=False))

    def _rendered(self) -> str | list[int]:
        """Return the prompt: text of a template, or token ids of a library."""
        return self.service.rendered_chat(
            for_template(self.body.messages, self.tools.instruction),
            tools=None if self.tools.instruction else self.tools.functions,
            add_generation_prompt=self.body.add_generation_prompt is not False,
            continue_final_message=bool(self.body.continue_final_message),
            source=self.body.chat_template,
            values=self._values(),
        )

    def _tokens_of_prompt(self) -> list[int]:
        inputs = self.service.llm.engine.inputs
        prompt = self._rendered()
        kept = sampling.kept_tokens(self.body, self.service)
        if isinstance(prompt, str):
            self._prompt_text = prompt
            prompt = self.short_text(prompt, kept)
        return inputs.encode(
            prompt,
            add_special_tokens=False,
            name="the chat",
            keep_last=kept,
            wanted=sampling.wanted_tokens(self.body),
        )[1]

    def _template(self, usual: str) -> str:
        """Return the source of the chat template: the request's own, or the usual one.

        Raises:
            HTTPError: the operator does not allow templates in requests.
        """
        given = self.body.chat_template
        expect_allowed(given, self.service.settings.request_templates)
        return usual if given is None else given

    def _expect_budget(self, template: str) -> None:
        """Check that the template tells the model the most tokens of reasoning, if they are given.

        Raises:
            HTTPError: the template has no place for them.
        """
        if self.body.thinking_token_budget is None or THINKING_BUDGET in template:
            return
        message = (
            "thinking_token_budget has a value that is not supported: the chat template of this "
            f"model has no value {THINKING_BUDGET}, so leave it out, or lower max_tokens"
        )
        raise HTTPError(400, message, field="thinking_token_budget", code="unsupported_value")

    def _values(self) -> Mapping[str, Any]:
        """Return further values for the template."""
        given = template_values(self.body.chat_template_kwargs) or {}
        values: dict[str, Any] = {}
        effort = self.body.reasoning_effort
        if effort is not None:
            values["reasoning_effort"] = effort
        # Qwen's and other templates have a value of this name.
        if effort == "none":
            values["enable_thinking"] = False
        budget = self.body.thinking_token_budget
        if budget is not None:
            values[THINKING_BUDGET] = budget
        return {**values, **given}

    def _reader(self, output: RequestOutput) -> AnswerReader:
        return self._format.reader(output, self._prompt_text, self.params)

    def structured(self) -> dict[str, Any]:
        """Return the sampling of an answer that must or may be a call."""
        settled: dict[str, Any] = {}
        if self._held is not None:
            settled["structured_output"] = self._held
        # Some models write special tokens around calls and reasoning.
        if self._format.shows_special_tokens:
            settled["skip_special_tokens"] = False
        return settled

    def prompt_tokens(self, output: RequestOutput) -> dict[str, Any]:
        """Return fields with what the request wants to know of the prompt."""
        wanted = self.prompt_logprobs(output)
        if self.body.return_token_ids:
            wanted["prompt_token_ids"] = output.prompt_token_ids
        return wanted

    def _token_ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self.body.return_token_ids else {}

    def deltas(
        self, index: int, output: RequestOutput, answer: CompletionOutput, news: News
    ) -> Iterator[dict[str, Any]]:
        """Yield the choices of chunks. The first has the role, the last the reason of the end."""
        if index not in self._told:
            self._told[index] = _SentCharacters(self._reader(output))
        told = self._told[index]
        reasoned, answered, written = told.reader.read(answer)
        calls = self._calls(answer, written)
        reasoning = told.news_of_reasoning(reasoned)
        text = told.news_of_text(answered)
        new_calls = told.news_of(calls)
        delta = _delta(reasoning, text, self._named(new_calls), news.first)
        logprobs = None
        if news.logprobs:
            logprobs = self._logprobs(news.tokens, news.logprobs)
        ids = self._token_ids(news.tokens)
        if delta or logprobs is not None or ids.get("token_ids"):
            yield {**_choice(index, delta, logprobs, None), **ids}
        if answer.finished:
            last = _choice(index, {}, None, self._finish_reason(answer, calls))
            yield {**last, "stop_reason": answer.stop_reason}

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        """Return a whole choice."""
        reasoned, text, written = self._reader(output).read(answer)
        calls = self._calls(answer, written)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text,
            "refusal": None,
        }
        if reasoned:
            message["reasoning_content"] = reasoned
        if calls:
            # OpenAI has no content beside calls.
            message["content"] = text or None
            message |= self._named(calls)
        logprobs = None
        if answer.logprobs:
            logprobs = self._logprobs(answer.token_ids, answer.logprobs)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(answer, calls),
            "stop_reason": answer.stop_reason,
            **self._token_ids(answer.token_ids),
        }

    def _calls(
        self, answer: CompletionOutput, written: Sequence[WrittenCall]
    ) -> list[dict[str, Any]]:
        """Return the calls of an answer in OpenAI's form."""
        name = f"call_{self.id[-24:]}{answer.index}"
        return [call.as_dict(f"{name}{number}") for number, call in enumerate(written)]

    def _named(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the field of a message with calls, or nothing without calls."""
        if not calls:
            return {}
        if self._is_older_form:
            return {"function_call": calls[0]["function"]}
        return {"tool_calls": calls}

    def _finish_reason(self, answer: CompletionOutput, calls: Sequence[object]) -> str | None:
        # A cut answer may hold a call, too, but the reason is the length then.
        if not calls or answer.finish_reason != "stop":
            return answer.finish_reason
        return "function_call" if self._is_older_form else "tool_calls"

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]]
    ) -> dict[str, Any]:
        rows = []
        for token, ranked in zip(tokens, logprobs, strict=True):
            top = [self._token(each, ranked) for each in likeliest(ranked, self.params)]
            rows.append({**self._token(token, ranked), "top_logprobs": top})
        return {"content": rows, "refusal": None}

    def _token(self, token: int, ranked: Mapping[int, Logprob]) -> dict[str, Any]:
        return {
            "token": token_text(token, ranked, self.body),
            "logprob": finite(ranked[token].logprob),
            "bytes": list(self.service.tokenizer.token_bytes(token)),
        }


def _delta(reasoning: str, text: str, calls: Mapping[str, Any], first: bool) -> dict[str, Any]:
    """Return the news of an answer. The first news have the role, and some content."""
    delta: dict[str, Any] = {"role": "assistant"} if first else {}
    if reasoning:
        delta["reasoning_content"] = reasoning
    if text:
        delta["content"] = text
    delta |= calls
    if delta.keys() == {"role"}:
        delta["content"] = ""
    return delta


def _choice(
    index: int, delta: Mapping[str, Any], logprobs: Any, finish_reason: str | None
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


class _SentCharacters:
    """The sent characters of an answer: of the reasoning, the text and the arguments of calls."""

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self._reasoned = 0
        self._characters = 0
        self._arguments: list[int] = []

    def news_of_reasoning(self, reasoned: str) -> str:
        """Return the new part of the reasoning."""
        news = reasoned[self._reasoned :]
        self._reasoned = len(reasoned)
        return news

    def news_of_text(self, text: str) -> str:
        """Return the new part of the text."""
        news = text[self._characters :]
        self._characters += len(news)
        return news

    def news_of(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the news of calls: each new call, and the further arguments of former calls."""
        news: list[dict[str, Any]] = []
        for number, call in enumerate(calls):
            arguments: str = call["function"]["arguments"]
            if number == len(self._arguments):
                self._arguments.append(0)
                news.append({"index": number, **call})
            elif len(arguments) > self._arguments[number]:
                told = self._arguments[number]
                function = {"arguments": arguments[told:]}
                news.append({"index": number, "function": function})
            self._arguments[number] = len(arguments)
        return news
