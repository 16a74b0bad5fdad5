"""Sampling: from the logits of a step to the tokens of its requests."""

from opgraft.engine.sampling.bad_words import bad_word_tokens
from opgraft.engine.sampling.batch import SamplingBatch
from opgraft.engine.sampling.logprobs import TokenLogprobs, prompt_logprobs
from opgraft.engine.sampling.sampler import SampledTokens, Sampler
from opgraft.engine.sampling.structured import Grammar, GrammarState, GrammarTokens, try_to_compile

__all__ = [
    "Grammar",
    "GrammarState",
    "GrammarTokens",
    "SampledTokens",
    "Sampler",
    "SamplingBatch",
    "TokenLogprobs",
    "bad_word_tokens",
    "prompt_logprobs",
    "try_to_compile",
]
