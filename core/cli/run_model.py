"""The work of ``opgraft run``, in a module that imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft.cli.answer import answer_prompts, measure_answers, open_llm, show_idle_plugins
from opgraft.cli.comparison import Measurement, ModelComparison, native_config
from opgraft.cli.neighbours import measure_vectors, show_neighbours
from opgraft.config import CacheConfig, ModelConfig, OpgraftConfig, set_config
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import InputError
from opgraft.models.build import generates
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import host_state
from opgraft.serving.engine_settings import engine_config
from opgraft.serving.llm import LLM

_SAMPLE = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "The train to the coast leaves at noon.",
    "Our railway connection departs at twelve.",
    "Bake the bread until the crust is golden.",
    "The loaf is done when it turns brown.",
)
_MEASURED = OpgraftConfig(cache=CacheConfig(prefix_reuse=False))
"""Each round of a measurement computes the prompts anew."""


def run_model(
    model: str,
    given: Sequence[str],
    params: SamplingParams,
    *,
    precision: str,
    compiled: bool,
    compare: bool,
    as_json: bool,
) -> None:
    """Answer texts with a language model, or embed them with an encoder, and print the result.

    Args:
        model: a checkpoint or its name.
        given: the texts; without texts, an encoder embeds sample sentences.
        params: of the answers.
        precision: of products in float32, for ``torch.set_float32_matmul_precision``.
        compiled: compile the steps.
        compare: run native definitions too, and report differences and speeds.
        as_json: print JSON.

    Raises:
        InputError: a language model has no prompt.
    """
    torch.set_float32_matmul_precision(precision)
    with (
        # First: the platform, whose defaults may depend on the model, is decided within.
        set_config(OpgraftConfig(model=ModelConfig(name=model)), origin="MODEL"),
        set_config(_compiling() if compiled else OpgraftConfig(), origin="--compile"),
        set_config(_MEASURED if compare else OpgraftConfig()),
    ):
        texts = given or _sample(model)
        plain = _measured_plain(model, texts, params) if compare else None
        llm = open_llm(model)
        show_idle_plugins()
        comparison = ModelComparison(plain, _measured(llm, texts, params)) if plain else None
        if llm.embeds:
            show_neighbours(llm, model, texts, as_json, comparison)
        else:
            answer_prompts(llm, model, texts, params, as_json, comparison)


def _compiling() -> OpgraftConfig:
    return host_state().settings().compiling(current_platform().compile_backend)


def _sample(model: str) -> tuple[str, ...]:
    """Return sample sentences for an encoder.

    Raises:
        InputError: the model is no encoder, and answers prompts.
    """
    if generates(engine_config(model, None, {}).resolved()):
        raise InputError(
            f'{model!r} answers a prompt, and none is given: opgraft run MODEL "…", or --input FILE'
        )
    return _SAMPLE


def _measured_plain(model: str, texts: Sequence[str], params: SamplingParams) -> Measurement:
    """Measure the model on native definitions. Release it before the other one is loaded."""
    with set_config(native_config()):
        llm = open_llm(model)
        try:
            return _measured(llm, texts, params)
        finally:
            llm.shutdown()


def _measured(llm: LLM, texts: Sequence[str], params: SamplingParams) -> Measurement:
    return measure_vectors(llm, texts) if llm.embeds else measure_answers(llm, texts, params)
