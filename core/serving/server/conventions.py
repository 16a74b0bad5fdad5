"""Facts about requests under the names of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opgraft.base.text import printable, shortened
from opgraft.base.timeline import current_timeline
from opgraft.engine.sampling_params import SamplingParams
from opgraft.serving.outputs import RequestOutput

OPERATION = "gen_ai.operation.name"
MODEL = "gen_ai.request.model"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"

_LARGEST = (1 << 63) - 1
"""The largest whole number in an attribute."""


def note_request(
    operation: str, model: str, prompt_tokens: int, further: Mapping[str, Any] | None = None
) -> None:
    """Note facts about a request in the current timeline, if there is one.

    Args:
        operation: "chat", "text_completion", "embeddings", or the last part of another path.
        model: name of the model or the adapter.
        prompt_tokens: of all prompts.
        further: facts by name. None stands for an unknown value. Numbers that are too large for an
            attribute are left out.
    """
    timeline = current_timeline()
    if timeline is None:
        return
    facts = {
        OPERATION: operation,
        MODEL: model,
        "gen_ai.provider.name": "opgraft",
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": prompt_tokens,
        **(further or {}),
    }
    timeline.tell({name: value for name, value in facts.items() if _is_told(value)})


def _is_told(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    return value is not None


def of_sampling(params: SamplingParams, with_text: bool) -> dict[str, Any]:
    """Return the facts about the sampling of a request.

    Args:
        params: of the request.
        with_text: tell text of the client, too.
    """
    stop = [printable(shortened(text)) for text in params.stop] if with_text else []
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.stop_sequences": stop or None,
        "gen_ai.request.choice.count": params.n,
    }


def note_answer(output: RequestOutput) -> None:
    """Add the tokens and the ends of the answers to a prompt, in the current timeline, if any."""
    timeline = current_timeline()
    if timeline is None:
        return
    answers = output.outputs
    tokens = sum(len(answer.token_ids) for answer in answers)
    reasons = [answer.finish_reason or "none" for answer in answers]
    found = {
        OUTPUT_TOKENS: tokens,
        CACHED_TOKENS: output.num_cached_tokens,
        FINISH_REASONS: reasons,
    }
    # A request may have several prompts.
    former = timeline.attributes
    timeline.tell(
        {name: former[name] + value if name in former else value for name, value in found.items()}
    )
