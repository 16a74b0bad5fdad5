"""The outputs of the CPU for the checkpoints of the bundle, in float32, and their file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a small dog who",
    "def add(a, b):",
    "1, 2, 3, 4, 5, 6, 7,",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Dear Sir or Madam,",
    "Why is the sky blue?",
)
SENTENCES = (
    "The king lived in a small house near the river.",
    "A man and a woman are talking.",
    "Water.",
    "In the first year of the war the city had a new church, a school and three hundred people.",
)
TOKENS = 24
"""Tokens that are generated after each prompt."""

LANGUAGE_MODEL, ENCODER = "smollm2.gguf", "minilm"


@dataclass(frozen=True)
class Expected:
    """Outputs of the CPU in float32.

    Attributes:
        prompts: token ids of each prompt.
        tokens: the likeliest tokens after each.
        margins: by how much the logit of each exceeds the second greatest: where it is tiny, rounding decides.
        logits: ``[prompts, vocabulary]``, at the end of each prompt.
        sentences: token ids of each sentence.
        states: ``[tokens, hidden_size]`` of each sentence, the last hidden states of the encoder.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    margins: list[list[float]]
    logits: Tensor
    sentences: list[list[int]]
    states: list[Tensor]

    def write(self, folder: Path) -> None:
        """Write ``expected.json`` and ``expected.safetensors``."""
        data = {"prompts": self.prompts, "tokens": self.tokens, "margins": self.margins}
        data["sentences"] = self.sentences
        (folder / "expected.json").write_text(json.dumps(data), encoding="utf-8")
        states = {f"states.{index}": state for index, state in enumerate(self.states)}
        save_file({"logits": self.logits, **states}, folder / "expected.safetensors")

    @classmethod
    def read(cls, folder: Path) -> Expected:
        """Read what ``write`` wrote."""
        data = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "expected.safetensors")
        states = [tensors[f"states.{index}"] for index in range(len(data["sentences"]))]
        return cls(**data, logits=tensors["logits"], states=states)


def language_model(bundle: Path, dtype: torch.dtype, device: str = "cpu") -> tuple[nn.Module, Any]:
    """Return the language model of the bundle as transformers makes it, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"gguf_file": LANGUAGE_MODEL}
    model: Any = AutoModelForCausalLM.from_pretrained(bundle, dtype=dtype, **given)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(bundle, **given)


def encoder(bundle: Path, dtype: torch.dtype, device: str = "cpu") -> tuple[nn.Module, Any]:
    """Return the encoder of the bundle as transformers makes it, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    model: Any = AutoModel.from_pretrained(bundle / ENCODER, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(bundle / ENCODER)


@torch.inference_mode()
def generated(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float], Tensor]:
    """Return the likeliest tokens after a prompt, their margins, and the logits at the end of the prompt."""
    device = next(model.parameters()).device
    ids, cache = torch.tensor([prompt], device=device), None
    tokens, margins, first = [], [], None
    for _ in range(count):
        output = model(ids, past_key_values=cache, use_cache=True)
        logits, cache = output.logits[0, -1].float(), output.past_key_values
        first = logits if first is None else first
        best = logits.topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        ids = best.indices[None, :1]
    return tokens, margins, first.cpu()  # type: ignore[union-attr]


@torch.inference_mode()
def compute(bundle: Path) -> Expected:
    """Compute everything on the CPU, by transformers alone."""
    model, tokenizer = language_model(bundle, torch.float32)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    tokens, margins, logits = zip(
        *[generated(model, each, TOKENS) for each in prompts], strict=True
    )
    encoding, words = encoder(bundle, torch.float32)
    sentences = [words(text)["input_ids"] for text in SENTENCES]
    states = [encoding(torch.tensor([each])).last_hidden_state[0] for each in sentences]
    return Expected(prompts, list(tokens), list(margins), torch.stack(logits), sentences, states)
