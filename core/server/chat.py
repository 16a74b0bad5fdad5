"""``/v1/chat/completions``: answers to chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opgraft.server.generating import Generating
from opgraft.server.protocol import ChatRequest
from opgraft.server.streams import News, finite, likeliest, token_text
from opgraft.serving.outputs import CompletionOutput, Logprob, RequestOutput


class Chat(Generating[ChatRequest]):
    """A chat, and the form of its answer."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    async def prompts(self) -> list[list[int]]:
        """Return the token ids of the text that the template makes of the chat."""
        return [await self.service.llm.prepare(self._rendered)]

    def _rendered(self) -> list[int]:
        engine = self.service.llm.engine
        text = engine.chat_template.render(self.body.messages, values=self.body.chat_template_kwargs)
        return engine.encode(text, add_special_tokens=False, name="the chat")[1]

    def delta(self, index: int, output: RequestOutput, answer: CompletionOutput, news: News) -> dict[str, Any]:
        """Return the choice of a chunk; the first names the role."""
        role = {"role": "assistant"} if news.first else {}
        return {
            "index": index,
            "delta": {**role, "content": news.text} if news.text or news.first else {},
            "logprobs": self._logprobs(news.tokens, news.logprobs) if news.logprobs else None,
            "finish_reason": answer.finish_reason,
        }

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        """Return a whole choice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.token_ids, answer.logprobs) if answer.logprobs else None,
            "finish_reason": answer.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
        rows = []
        for token, ranked in zip(tokens, logprobs, strict=True):
            top = [_token(each, ranked) for each in likeliest(ranked, self.params)]
            rows.append({**_token(token, ranked), "top_logprobs": top})
        return {"content": rows, "refusal": None}


def _token(token: int, ranked: Mapping[int, Logprob]) -> dict[str, Any]:
    text = token_text(token, ranked)
    return {"token": text, "logprob": finite(ranked[token].logprob), "bytes": list(text.encode("utf-8", "replace"))}
