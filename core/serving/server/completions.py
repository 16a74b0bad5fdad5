"""``/v1/completions``: texts that continue prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opgraft.serving.detokenizer import Detokenizer
from opgraft.serving.outputs import CompletionOutput, Logprob, RequestOutput
from opgraft.serving.prompts import Prompt
from opgraft.serving.server import sampling
from opgraft.serving.server.generating import Generating
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.prompts import several
from opgraft.serving.server.protocol import CompletionRequest
from opgraft.serving.server.service import Service
from opgraft.serving.server.streams import News, finite, likeliest, text_of_id, token_text


class Completion(Generating[CompletionRequest]):
    """A request for texts, and the form of its answer."""

    prefix = "cmpl"
    operation = "text_completion"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_field = "prompt"

    def __init__(self, service: Service, body: CompletionRequest, passing: Passing) -> None:
        super().__init__(service, body, passing)
        self._written: dict[int, tuple[Detokenizer, int]] = {}
        self._echoed: dict[int, list[int]] = {}

    async def prompts(self) -> list[list[int]]:
        """Return the token ids of the prompts."""
        prompts = several(self.body.prompt, "prompt")
        sampling.expect_answers(self.body, len(prompts), self.service)
        return await self.service.llm.prepare(self._encoded, prompts)

    def _encoded(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        encode = self.service.llm.engine.inputs.encode
        kept = sampling.kept_tokens(self.body, self.service)
        short: list[Prompt] = [
            self.short_text(prompt, kept) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        names = ["prompt"]
        if len(prompts) > 1:
            names = [f"prompt[{place}]" for place in range(len(prompts))]
        named = zip(short, names, strict=True)
        wanted = sampling.wanted_tokens(self.body)
        return [
            encode(prompt, name=name, keep_last=kept, wanted=wanted)[1] for prompt, name in named
        ]

    def counted(self, output: RequestOutput) -> int:
        """Return the number of tokens in the answers to a prompt."""
        # The engine has computed a token that the answer leaves out.
        if sampling.scores_only(self.body):
            return 0
        return super().counted(output)

    def deltas(
        self, index: int, output: RequestOutput, answer: CompletionOutput, news: News
    ) -> Iterator[dict[str, Any]]:
        """Yield the choice of a chunk. The first chunk has the echo."""
        echoed = self.body.echo and news.first
        choice = self._choice(
            index, output if echoed else None, answer, news.text, news.tokens, news.logprobs
        )
        yield {**choice, **self._token_ids(output, news.tokens, news.first)}

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        """Return a whole choice."""
        echoed = output if self.body.echo else None
        choice = self._choice(
            index, echoed, answer, answer.text, answer.token_ids, answer.logprobs or []
        )
        ids = self._token_ids(output, answer.token_ids, first=True)
        return {
            **choice,
            **ids,
            **self.prompt_logprobs(output),
        }

    def _token_ids(
        self, output: RequestOutput, tokens: Sequence[int], first: bool
    ) -> dict[str, Any]:
        """Return fields with the token ids of an answer, and at first of the prompt."""
        if not self.body.return_token_ids:
            return {}
        return {
            "prompt_token_ids": output.prompt_token_ids if first else None,
            "token_ids": [] if sampling.scores_only(self.body) else list(tokens),
        }

    def _choice(
        self,
        index: int,
        echoed: RequestOutput | None,
        answer: CompletionOutput,
        text: str,
        tokens: Sequence[int],
        logprobs: Sequence[Mapping[int, Logprob]],
    ) -> dict[str, Any]:
        if sampling.scores_only(self.body):
            text = ""
            tokens = ()
            logprobs = ()
        prompt = () if echoed is None else echoed.prompt_token_ids
        if echoed is not None:
            text = self._prompt_text(prompt) + text
        found: dict[str, Any] | None = None
        if self.params.logprobs is not None:
            prompt_logprobs = () if echoed is None else echoed.prompt_logprobs or ()
            # The engine may have ended before the last log-probabilities.
            of_prompt = zip(prompt, prompt_logprobs, strict=False)
            of_answer = zip(tokens, logprobs, strict=False)
            places = [*of_prompt, *of_answer]
            offsets = self._offsets(index, prompt, tokens)
            found = {**self._logprobs(places), "text_offset": offsets[: len(places)]}
        return {
            "index": index,
            "text": text,
            "logprobs": found,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def _offsets(self, index: int, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the places of tokens in the text of a choice, in characters.

        A token that continues a character has the place of this character.
        """
        tokenizer = self.service.llm.engine.inputs.tokenizer
        if tokenizer is None:
            return [0] * (len(prompt) + len(tokens))
        if index not in self._written:
            context = self.prompt_ids[index // self.params.n]
            skips = self.params.skip_special_tokens
            answer = Detokenizer(tokenizer, context, skip_special_tokens=skips)
            start = len(self._prompt_text(prompt))
            self._written[index] = answer, start
        answer, start = self._written[index]
        number = index // self.params.n
        if prompt and number not in self._echoed:
            echo = Detokenizer(tokenizer, skip_special_tokens=False)
            self._echoed[number] = list(_places(echo, prompt))
        echoed = self._echoed[number] if prompt else []
        answered = [start + place for place in _places(answer, tokens)]
        return echoed + answered

    def _prompt_text(self, prompt: Sequence[int]) -> str:
        tokenizer = self.service.llm.engine.inputs.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=False)

    def _logprobs(
        self, places: Sequence[tuple[int, Mapping[int, Logprob] | None]]
    ) -> dict[str, Any]:
        """Return the log-probabilities at places; the first token of a prompt has none."""
        texts: list[str] = []
        own: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for token, ranked in places:
            if ranked is None:
                texts.append(self._first_token(token))
                own.append(None)
                top.append(None)
            else:
                texts.append(token_text(token, ranked, self.body))
                own.append(finite(ranked[token].logprob))
                top.append(self._top(ranked))
        return {
            "tokens": texts,
            "token_logprobs": own,
            "top_logprobs": top,
        }

    def _top(self, ranked: Mapping[int, Logprob]) -> dict[str, float]:
        """Return the likeliest tokens by text. Of tokens with one text, the likeliest counts."""
        found: dict[str, float] = {}
        for token in likeliest(ranked, self.params):
            text = token_text(token, ranked, self.body)
            found.setdefault(text, finite(ranked[token].logprob))
        return found

    def _first_token(self, token: int) -> str:
        """Return the text of the first token of a prompt, which has no log-probability."""
        if self.body.return_tokens_as_token_ids:
            return text_of_id(token)
        return self._prompt_text([token])


def _places(text: Detokenizer, tokens: Sequence[int]) -> Iterator[int]:
    """Add tokens to a text, and yield the place of each in characters."""
    for token in tokens:
        yield text.place
        text.add(token)
