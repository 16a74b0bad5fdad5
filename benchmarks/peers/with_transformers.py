"""transformers' ``generate``: one request as it is, several in one batch that is padded on the left."""

from __future__ import annotations

import os
from typing import Any

import torch
from protocol import Answer, Generate, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

generation_config: Any = GenerationConfig  # which has no types


def start(checkpoint: str, dtype: str) -> Generate:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    model.eval()
    if os.environ.get("CONTINUOUS"):
        return continuous(model)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_tokens: int) -> Answer:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )
        options: Any = generation_config(
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        tokens = model.generate(ids, attention_mask=mask, generation_config=options)
        return {"tokens": tokens[:, longest:].tolist()}

    return generate


def continuous(model: Any) -> Generate:
    """Its own continuous batching, with a cache for about as many tokens as the other engines have."""
    cache: Any = ContinuousBatchingConfig
    # Of 256 tokens; else it takes most of the memory.
    bounds = cache(num_blocks=96, max_batch_tokens=2048)

    def generate(prompts: list[list[int]], max_tokens: int) -> Answer:
        options = generation_config(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = model.generate_batch(
            inputs=prompts,
            generation_config=options,
            continuous_batching_config=bounds,
            progress_bar=False,
        )
        return {"tokens": [outputs[name].generated_tokens for name in outputs]}

    return generate


if __name__ == "__main__":
    serve(start, "transformers")
