"""transformers' ``generate``: one request as it is, several in one batch that is padded on the left."""

from __future__ import annotations

import os

import torch
from protocol import Generate, serve
from transformers import AutoModelForCausalLM, GenerationConfig


def start(checkpoint: str, dtype: str) -> Generate:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    if os.environ.get("CONTINUOUS"):
        return continuous(model)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = GenerationConfig(
            max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        return model.generate(ids, attention_mask=mask, generation_config=options)[:, longest:].tolist()

    return generate


def continuous(model: torch.nn.Module) -> Generate:
    """Its own continuous batching."""

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        options = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = model.generate_batch(inputs=prompts, generation_config=options, progress_bar=False)
        return [outputs[name].generated_tokens for name in outputs]

    return generate


if __name__ == "__main__":
    serve(start)
