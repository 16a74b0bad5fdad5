"""Greedy generation with one model for one prompt, over a cache of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from opgraft.errors import CheckpointError, InputError
from opgraft.models.files import Weights, read_json
from opgraft.ops.attention import AttentionBatch, attending
from opgraft.ops.attention.decoder import attention_layers
from torch import Tensor

BLOCK_SIZE = 32
"""Tokens of a block of the cache."""


@runtime_checkable
class HasLogits(Protocol):
    """A model that generates: of hidden states it makes logits ``[rows, vocab_size]``."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits; ``None`` on ranks that do not gather them."""


def generate(model: Any, prompt: Sequence[int], *, max_tokens: int, stop: Collection[int] = ()) -> Iterator[int]:
    """Yield the likeliest next token, again and again, until one of ``stop``, which is not yielded.

    Args:
        model: a ``Model`` with ``compute_logits``.
        prompt: token ids, at least one.
        max_tokens: most tokens to yield.
        stop: ids at which the answer ends.

    Raises:
        InputError: the model is none that generates, the prompt is empty, or it and ``max_tokens`` are longer than the
            model's context.
    """
    _expect_logits(model)
    layers = attention_layers(model)
    limit = model.max_position
    if not prompt:
        raise InputError("the prompt has no tokens: give some text")
    if len(prompt) + max_tokens > limit:
        raise InputError(
            f"the prompt has {len(prompt)} tokens, and with {max_tokens} to generate that is more than the {limit} of "
            "the model's context: shorten it, or generate fewer"
        )
    weight = next(model.parameters())
    longest = len(prompt) + max_tokens
    blocks = -(-longest // BLOCK_SIZE)
    caches = {
        name: torch.zeros(layer.kv_cache_shape(blocks, BLOCK_SIZE), dtype=model.dtype, device=weight.device)
        for name, layer in layers.items()
    }
    batch_of = partial(
        AttentionBatch.of_sequences,
        block_table=torch.arange(blocks)[None],
        caches=caches,
        block_size=BLOCK_SIZE,
        max_context_len=longest,
        device=weight.device,
    )
    done, new = 0, list(prompt)
    for _ in range(max_tokens):
        token = _next(model, new, done, batch_of([len(new)], [done + len(new)]), weight.device)
        if token in stop:
            return
        yield token
        done, new = done + len(new), [token]


def _expect_logits(model: object) -> None:
    if not isinstance(model, HasLogits):
        raise InputError(
            f"{type(model).__name__} has no compute_logits, as an encoder has none, so it answers no prompt: give a "
            "causal language model, or run this one on lines of text: 'opgraft run MODEL', without PROMPT"
        )


@torch.inference_mode()
def _next(model: Any, tokens: Sequence[int], done: int, batch: AttentionBatch, device: torch.device) -> int:
    """Compute the likeliest token after ``tokens``, before which ``done`` tokens are in the cache."""
    ids = torch.tensor(tokens, device=device)
    positions = torch.arange(done, done + len(tokens), device=device)
    with attending(batch):
        hidden = model(ids, positions)
    return int(model.compute_logits(hidden[-1:]).argmax())


def decoded(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they come, each piece once its characters are whole."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # the bytes of a character may be spread over several tokens
            yield text.removeprefix(shown)
            shown = text
    rest = tokenizer.decode(ids, skip_special_tokens=True).removeprefix(shown)
    if rest:
        yield rest


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt: a user's message in the chat template, or the text where there is none."""
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"])
    return list(tokenizer(text)["input_ids"])


def stop_tokens(tokenizer: Any, config: Any, weights: Weights | None = None) -> frozenset[int]:
    """Return the ids that end an answer, as the tokenizer, the model's config and its checkpoint tell.

    Models that were trained to chat often end a turn with a token of which only the checkpoint tells: in
    ``generation_config.json``, or as ``eot_token_id`` in a GGUF file.

    Raises:
        CheckpointError: ``generation_config.json`` cannot be read, or has other than integers.
    """
    given = (getattr(tokenizer, "eos_token_id", None), getattr(config, "eos_token_id", None), _ends_of_turns(weights))
    return frozenset(token for ids in given for token in (ids if isinstance(ids, list) else [ids]) if token is not None)


def _ends_of_turns(weights: Weights | None) -> Any:
    if weights is None:
        return None
    if weights.is_gguf:
        return weights.metadata.get("tokenizer.ggml.eot_token_id")
    file = (weights.path if weights.path.is_dir() else weights.path.parent) / "generation_config.json"
    found = read_json(file).get("eos_token_id") if file.is_file() else None
    if any(type(token) is not int for token in (found if isinstance(found, list) else [found]) if token is not None):
        raise CheckpointError(f"{file}: eos_token_id is {found!r:.80}, expected a token id or a list of them")
    return found
