"""One request as the sampler sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opgraft.engine.sampling.structured import GrammarState
from opgraft.engine.sampling.token_counts import TokenCounts
from opgraft.engine.sampling_params import SamplingParams


@dataclass(slots=True)
class Row:
    """One request: its settings, its tokens so far, and the state of its grammar.

    Attributes:
        params: its settings.
        prompt, output: token ids; the output grows.
        stream: names its random numbers.
        stop: tokens that end it, which ``min_tokens`` holds back.
        bad_words: token ids of each bad word.
        grammar: of structured output, with every token of the output accepted.
        counts: of its tokens, once penalties have asked for them.
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
        """Tell whether any penalty is asked for."""
        params = self.params
        return (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        )

    @property
    def filtered(self) -> bool:
        """Tell whether top-k, top-p or min-p is asked for."""
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0

    @property
    def restricted(self) -> bool:
        """Tell whether there are tokens that may be banned at some position."""
        return bool(self.bad_words) or self.params.min_tokens > 0

    def banned(self) -> Iterator[int]:
        """Yield the tokens that may not come next: those that end it too early, and the last ones of bad words."""
        if len(self.output) < self.params.min_tokens:
            yield from self.stop
        for *begin, last in self.bad_words:
            if not begin or self.output[-len(begin) :] == begin:
                yield last

    def counted(self, vocabulary: int) -> TokenCounts:
        """Return the counts of its tokens, which penalties are taken by; they grow with the output from now on."""
        if self.counts is None or self.counts.vocabulary != vocabulary:
            prompt = self.prompt if self.params.repetition_penalty != 1 else ()
            self.counts = TokenCounts(prompt, self.output, vocabulary)
        return self.counts
