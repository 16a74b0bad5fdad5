"""The layers of a decoder in one call: the bits that their modules would give, and the modules where they are needed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from engine.engines import prompts, recorded, serve, settings
from opgraft.config import CacheConfig, QuantizationSettings
from opgraft.engine.engine_core import EngineCore
from opgraft.ops.layernorm import RMSNorm
from random_decoders import written
from torch import Tensor, nn

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 192, "head_dim": 32, "num_key_value_heads": 2}
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


class Counted:
    """The plan of an engine's model, with how many calls it answered and how many it left to the modules."""

    def __init__(self, core: EngineCore) -> None:
        self.model: Any = core.executor.worker.runner.model
        self.stack = self.model.model
        self.answered = self.left = 0
        run = self.stack.plan.run

        def counting(*args: Any) -> Any:
            result = run(*args)
            self.answered += result is not None
            self.left += result is None
            return result

        self.stack.plan.run = counting


def made(folder: Path, dtype: str = "float32", **sections: Any) -> EngineCore:
    given = settings(folder)
    model = dataclasses.replace(given.model, dtype=dtype)
    cache = CacheConfig(block_size=16, num_blocks=40)
    return EngineCore(dataclasses.replace(given, model=model, cache=cache, **sections))


def logits_of(core: EngineCore, *lengths: int) -> dict[Any, Tensor]:
    pairs = [recorded(f"{number}", prompt, 6) for number, prompt in enumerate(prompts(*lengths))]
    serve(core, [request for request, _ in pairs])
    return {(number, key): row for number, (_, each) in enumerate(pairs) for key, row in each.logits.items()}


def by_modules(folder: Path, *lengths: int, **given: Any) -> dict[Any, Tensor]:
    core = made(folder, **given)
    core.executor.worker.runner.model.model.plan = opgraft.ops.decoder_plan.DecoderPlan.__new__(object)
    return logits_of(core, *lengths)


def expect_equal(ours: dict[Any, Tensor], others: dict[Any, Tensor]) -> None:
    assert list(ours) == list(others)
    assert all(torch.equal(row, others[key]) for key, row in ours.items())


@pytest.fixture
def folder(plugin: Path, tmp_path: Path) -> Path:
    written("Llama", tmp_path / "model", **SHAPE, **BIASES)
    return tmp_path / "model"
