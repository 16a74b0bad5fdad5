"""The tokens that end an answer."""

from __future__ import annotations

from typing import Any

from opgraft.errors import CheckpointError
from opgraft.models.files import Weights, read_json
from opgraft.models.gguf_ends import ends_of_answers

SUPPRESSED = "tokenizer.ggml.suppress_tokens"
"""The key of a GGUF file for tokens that no answer may have."""


def stop_tokens(tokenizer: Any, config: Any, weights: Weights, vocab_size: int) -> frozenset[int]:
    """Return the ids that end an answer: of the tokenizer, the model's config and the checkpoint.

    Chat models often end a turn with another token than the tokenizer's. Only the checkpoint names
    this token: in ``generation_config.json``, or in a GGUF file under keys such as
    ``eot_token_id``, or by its text.

    Raises:
        CheckpointError: ``generation_config.json`` cannot be read, or has wrong ids.
    """
    given = (
        getattr(tokenizer, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
        _ends_of_turns(weights, vocab_size),
    )
    found: set[int] = set()
    for ids in given:
        # Configs have one id, a list of ids, or none.
        listed = ids if isinstance(ids, list) else [ids]
        found.update(token for token in listed if token is not None)
    return frozenset(found)


def _ends_of_turns(weights: Weights, vocab_size: int) -> Any:
    """Return an id or a list of ids from the checkpoint; None if there is none."""
    if weights.is_gguf:
        return list(ends_of_answers(weights.metadata))
    folder = weights.path if weights.path.is_dir() else weights.path.parent
    file = folder / "generation_config.json"
    found = read_json(file).get("eos_token_id") if file.is_file() else None
    for token in found if isinstance(found, list) else [found]:
        if token is None:
            continue
        if type(token) is not int:
            raise CheckpointError(
                f"{file}: eos_token_id is {found!r:.80}, expected a token id or a list of them"
            )
        # A file of another model: answers would never end.
        if not 0 <= token < vocab_size:
            raise CheckpointError(
                f"{file}: eos_token_id {token!s:.20} is no token of the model, whose vocabulary "
                f"has {vocab_size}: take the files of one model"
            )
    return found


def suppressed_tokens(weights: Weights, vocab_size: int) -> tuple[tuple[int], ...]:
    """Return the suppressed tokens of a GGUF file, each as a bad word of one token.

    Raises:
        CheckpointError: an id is no token of the model.
    """
    words = []
    for token in weights.metadata.get(SUPPRESSED, ()):
        if not 0 <= int(token) < vocab_size:
            raise CheckpointError(
                f"{weights.path}: {SUPPRESSED} has {token!s:.20}, which is no token of the model, "
                f"whose vocabulary has {vocab_size}: take the file from its publisher again"
            )
        words.append((int(token),))
    return tuple(words)
