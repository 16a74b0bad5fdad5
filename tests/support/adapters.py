"""Small decoders with adapters that PEFT has made and saved, and the answers of both packages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import LLM, SamplingParams
from support.random_decoders import SIZES

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYWHERE = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
PROMPTS = [[5, 17, 80, 3, 41], [9, 9, 62], [71, 4, 33, 28, 90, 11, 2, 54]]
LENGTH = 8


def saved_base(folder: Path, architecture: str = "Llama", **changes: Any) -> Path:
    """Save a small decoder with random weights, and return its folder."""
    config = getattr(transformers, f"{architecture}Config")(
        **{**SIZES, "num_key_value_heads": 2, **changes}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    # Larger weights than initial ones, so that adapters change tokens.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def saved_adapter(base: Path, folder: Path, seed: int = 1, **settings: Any) -> Path:
    """Save an adapter with random matrices for a base model, and return its folder."""
    model = loaded(base)
    wanted = {"target_modules": ATTENTION, "r": 4, "lora_alpha": 8, **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **wanted))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values * parameter.shape[-1] ** -0.5)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def loaded(base: Path) -> Any:
    """Load a base model in float64."""
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).eval()


def expected(base: Path, adapter: Path | None, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the greedy answers of transformers, with the adapter of PEFT, in float64."""
    model = loaded(base)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).double().eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        for _ in range(LENGTH):
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, -1]
            ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def expected_logprobs(
    base: Path, adapter: Path | None, prompts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the log-probability of each token of a prompt but the first, as ``expected``."""
    model = loaded(base)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).double().eval()
    found = []
    for prompt in prompts:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([list(prompt)])).logits[0]
        rows = logits.log_softmax(-1)[:-1]
        found.append(rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist())
    return found


def logprobs(llm: LLM, prompts: Sequence[Sequence[int]], lora_request: Any) -> list[list[float]]:
    """Return the log-probabilities of an engine, as ``expected_logprobs``."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([list(each) for each in prompts], params, lora_request=lora_request)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        rows = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        found.append([row[token].logprob for token, row in rows])
    return found


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], lora_request: Any = None) -> list[list[int]]:
    """Return the greedy answers of an engine."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    outputs = llm.generate([list(each) for each in prompts], params, lora_request=lora_request)
    failed = [each.outputs[0].error for each in outputs if each.outputs[0].error]
    assert not failed, failed
    return [each.outputs[0].token_ids for each in outputs]


def engine(base: Path, **settings: Any) -> LLM:
    """Return an engine that takes adapters, in float32 unless settings say otherwise."""
    usual = {"dtype": "float32", "num_gpu_blocks_override": 64}
    return LLM(str(base), enable_lora=True, **{**usual, **settings})
