"""One request as the sampler sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opgraft.engine.sampling.structured import GrammarState
from opgraft.engine.sampling.token_counts import TokenCounts
from opgraft.engine.sampling_params import SamplingParams


@dataclass(slots=True)
class SamplingRow:
    """One request: settings, tokens so far, and the state of the grammar.

    Attributes:
        params: settings of the request.
        prompt, output: token ids; the output grows.
        stream: name of the random numbers, from ``stream_of``.
        stop: tokens that end the request, banned before ``min_tokens``.
        bad_words: token ids of each bad word.
        grammar: of structured output, with every token of the output accepted.
        counts: of the tokens, once penalties need them.
    """

    params: SamplingParams
    prompt: Sequence[int]
    output: list[int]
    stream: bytes
    stop: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    grammar: GrammarState | None
    counts: TokenCounts | None = None

    @property
    def penalised(self) -> bool:
        """Return True if the request asks for a penalty."""
        params = self.params
        if params.repetition_penalty != 1:
            return True
        return params.frequency_penalty != 0 or params.presence_penalty != 0

    @property
    def filtered(self) -> bool:
        """Return True if the request asks for top-k, top-p or min-p."""
        params = self.params
        return params.top_k > 0 or params.top_p < 1 or params.min_p > 0

    @property
    def restricted(self) -> bool:
        """Return True if tokens may be banned at some position."""
        return bool(self.bad_words) or self.params.min_tokens > 0

    def banned(self) -> Iterator[int]:
        """Yield the tokens that may not come next: early ends, and last tokens of bad words."""
        if len(self.output) < self.params.min_tokens:
            yield from self.stop
        # The last token of a bad word is banned if the tokens before it have just come.
        for *begin, last in self.bad_words:
            if not begin or self.output[-len(begin) :] == begin:
                yield last

    def counted(self, vocabulary: int) -> TokenCounts:
        """Return the counts of the tokens. From now on, the counts grow with the output."""
        if self.counts is None or self.counts.vocabulary != vocabulary:
            # Only repetition looks at the prompt.
            prompt = self.prompt if self.params.repetition_penalty != 1 else ()
            self.counts = TokenCounts(prompt, self.output, vocabulary)
        return self.counts
