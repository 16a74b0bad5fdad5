"""Ropes of written models that depend on the length of the context, and norms over key heads that ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.config import ModelConfig, OpgraftConfig
from opgraft.errors import ModelError
from opgraft.models import load_model
from opgraft.ops.attention import AttentionBatch, attending
from opgraft.ops.attention.decoder import attention_layers
from support.greedy import greedy_tokens
from support.ranks import Ranks

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 2.0, 3.0, 3.0, 4.0, 4.0],
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def written(family: str, folder: Path, **values: Any) -> Any:
    """A model of transformers with random weights, whose checkpoint is in ``folder``."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **values})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    model.save_pretrained(folder)
    return model


def phi3(folder: Path) -> Any:
    return written("Phi3", folder, rope_parameters=LONGROPE, original_max_position_embeddings=32)


def loaded(folder: Path, longest: int | None = None) -> Any:
    name = ModelConfig(name=str(folder), dtype="float32", max_model_len=longest)
    return load_model(OpgraftConfig(model=name))


def ids(count: int) -> torch.Tensor:
    return torch.randint(3, 99, (count,), generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.compute_logits(model(tokens, torch.arange(len(tokens))))
    return logits


@torch.no_grad()
def expected_of(reference: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = reference(tokens[None]).logits[0]
    return logits


@torch.no_grad()
def in_chunks(model: Any, tokens: torch.Tensor, longest: int | None, size: int) -> torch.Tensor:
    """The logits of one sequence, which may come to have ``longest`` tokens, in chunks over a cache."""
    caches = {
        name: torch.zeros(layer.kv_cache_shape(25, 4))
        for name, layer in attention_layers(model).items()
    }
    logits, done = [], 0
    for chunk in tokens.split(size):
        lengths, table = ([len(chunk)], [done + len(chunk)]), torch.arange(25)[None]
        batch = AttentionBatch.of_sequences(
            *lengths, table, caches, block_size=4, max_context_len=longest
        )
        with attending(batch):
            logits.append(model.compute_logits(model(chunk, torch.arange(done, done + len(chunk)))))
        done += len(chunk)
    return torch.cat(logits)


@pytest.mark.parametrize("longest", [None, 32, 48])
def test_longrope(longest: int | None, tmp_path: Path) -> None:
    """Short and long sequences in turn give what transformers gives, whatever the longest context."""
    reference = phi3(tmp_path)
    model = loaded(tmp_path, longest)
    for count in (10, 33, 32, 48):
        if count <= (longest or 64):
            torch.testing.assert_close(
                logits_of(model, ids(count)), expected_of(reference, ids(count)), **TOLERANCE
            )


def test_longrope_over_a_cache(tmp_path: Path) -> None:
    """A sequence that grows beyond the short context has keys of one kind, from its first token on."""
    reference = phi3(tmp_path)
    model = loaded(tmp_path)
    for count, longest in ((40, 64), (40, None), (20, 32)):
        expected = expected_of(reference, ids(count))
        torch.testing.assert_close(in_chunks(model, ids(count), longest, 7), expected, **TOLERANCE)


def test_longrope_generates(tmp_path: Path) -> None:
    """Greedy generation in the short context is that of transformers."""
    reference = phi3(tmp_path)
    whole = reference.generate(ids(12)[None], max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert greedy_tokens(loaded(tmp_path), ids(12).tolist(), 10) == whole[0, 12:].tolist()


@pytest.mark.parametrize("longest", [None, 32, 128])
def test_dynamic(longest: int | None, tmp_path: Path) -> None:
    """The base grows from the length that the model was trained for, and shrinks again."""
    reference = written("Llama", tmp_path, rope_parameters=DYNAMIC)
    model = loaded(tmp_path, longest)
    for count in (30, 100, 128, 40):
        if count <= (longest or 64):
            torch.testing.assert_close(
                logits_of(model, ids(count)), expected_of(reference, ids(count)), **TOLERANCE
            )
    if longest == 128:
        torch.testing.assert_close(
            in_chunks(model, ids(100), 100, 30),
            expected_of(reference, ids(100)),
            rtol=1e-4,
            atol=1e-4,
        )


def test_yarn_for_too_long_a_context(tmp_path: Path) -> None:
    """A context beyond the stretched one is an error before there is a model."""
    written("Llama", tmp_path, rope_parameters=YARN)
    assert logits_of(loaded(tmp_path, 64), ids(64)).isfinite().all()
    with pytest.raises(
        ModelError, match=r"'yarn' has 64 positions.* 65: set model\.max_model_len to at most 64"
    ):
        loaded(tmp_path, 65)


def test_norm_of_key_heads_that_ranks_share(tmp_path: Path) -> None:
    """The norm over all key heads counts each once, though both ranks hold the only one."""
    expected = expected_of(written("Olmo2", tmp_path, num_key_value_heads=1), ids(17))
    with Ranks(2) as two:
        for logits in two.run(on_rank, str(tmp_path)):
            torch.testing.assert_close(logits, expected, **TOLERANCE)


def on_rank(folder: str) -> torch.Tensor:
    return logits_of(loaded(Path(folder)), ids(17))
