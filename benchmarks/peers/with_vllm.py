"""vLLM's ``LLM`` in the wheel for CPUs."""

from __future__ import annotations

import importlib
import os

from protocol import Answer, Generate, serve


def start(checkpoint: str, dtype: str) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    vllm = importlib.import_module("vllm")

    llm = vllm.LLM(
        checkpoint,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=2560,
        max_num_seqs=128,
        enable_prefix_caching=False,
        enforce_eager=bool(os.environ.get("EAGER")),
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> Answer:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    return generate


if __name__ == "__main__":
    serve(start, "vllm-cpu")
