"""The work of ``opgraft trace-shapes``, in a module that imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from opgraft.cli.comparison import native_config
from opgraft.cli.verified_models import decoder_steps, made_by
from opgraft.cli.verify import is_function
from opgraft.config import set_config
from opgraft.models.build import describe_model, load_model
from opgraft.serving.engine_settings import engine_config
from opgraft.testing.shape_recording import by_tokens, recording
from opgraft.testing.shapes import FormCall
from opgraft.testing.verification import VerifiedStep
from torch import nn

Counts = Mapping[FormCall, int]


@contextmanager
def recording_natives() -> Iterator[Counts]:
    """Count the calls of forms in the block, where ops run their native definitions."""
    with set_config(native_config()), recording() as counts:
        yield counts


def trace_model(name: str, tokens: int, *, on_meta: bool) -> Counts:
    """Return the calls of a checkpoint's model, or of the model of ``module:function``."""
    if is_function(name):
        return trace_function(name)
    return trace_checkpoint(name, tokens, on_meta=on_meta)


def trace_checkpoint(name: str, tokens: int, *, on_meta: bool) -> Counts:
    """Return the calls that the model of a checkpoint makes for a prompt and one token more.

    Args:
        name: of the checkpoint; on the device ``meta``, a folder with a ``config.json`` is enough.
        tokens: of the prompt.
        on_meta: build the model without weights, and compute shapes only.
    """
    config = engine_config(name, None, {}).resolved()
    with set_config(native_config()):
        model = (describe_model if on_meta else load_model)(config)

        def counts_for(prompt: int) -> Counts:
            # No shape depends on the numbers.
            ids = torch.zeros(prompt + 1, dtype=torch.int64)
            steps = decoder_steps(model, ids, config)
            return _counts(model, steps, computes=not on_meta)

        # The second run tells which sizes are the number of tokens.
        return by_tokens(counts_for(tokens), counts_for(tokens + 1), tokens)


def trace_function(name: str) -> Counts:
    """Return the calls of the model that a function ``module:function`` returns, grafted.

    Parameters on the device ``meta`` have no values. Then shapes alone are computed.
    """
    with set_config(native_config()):
        made = made_by(name)
        is_meta = any(parameter.is_meta for parameter in made.grafted.parameters())
        return _counts(made.grafted, made.steps(made.grafted), computes=not is_meta)


def _counts(model: nn.Module, steps: Sequence[VerifiedStep], *, computes: bool) -> Counts:
    with torch.no_grad(), recording(computes=computes) as counts:
        for step in steps:
            with step.attending():
                step.call(model)
    return counts
