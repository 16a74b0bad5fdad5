"""Read the defaults of sampling in a checkpoint's ``generation_config.json``."""

from __future__ import annotations

from typing import Any

from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import CheckpointError, RequestError
from opgraft.models.files import Weights, read_json

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Key in the file → field of ``SamplingParams``."""


def sampling_defaults(weights: Weights) -> dict[str, Any]:
    """Return fields of ``SamplingParams`` that the publisher of a checkpoint recommends.

    Raises:
        CheckpointError: the file cannot be read, or has a wrong value.
    """
    folder = weights.path if weights.path.is_dir() else weights.path.parent
    file = folder / "generation_config.json"
    if weights.is_gguf or not file.is_file():
        return {}
    found = read_json(file)
    given = {ours: found[key] for key, ours in _NAMES.items() if found.get(key) is not None}
    # Made once at the start: a wrong default would fail every request later.
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise CheckpointError(
            f"{file} has a default of sampling that cannot be followed: {error.message}. Correct "
            "it, or set model.generation_config to none"
        ) from error
    return given
