"""opgraft's ``LLM``."""

from __future__ import annotations

import json
import os
from typing import Any

from opgraft import LLM, SamplingParams
from protocol import Answer, Generate, serve


def start(checkpoint: str, dtype: str) -> Generate:
    settings = {
        "dtype": dtype,
        "max_model_len": 2560,
        "max_num_seqs": 128,
        "enable_prefix_caching": False,
    }
    llm = LLM(
        checkpoint,
        **{
            **settings,
            "cache.memory_bytes": 2 << 30,
            **json.loads(os.environ.get("SETTINGS", "{}")),
        },
    )

    def generate(prompts: list[Any], max_tokens: int) -> Answer:
        is_chat = isinstance(prompts[0], str)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=not is_chat)
        if is_chat:
            chats = [[{"role": "user", "content": text}] for text in prompts]
            outputs = llm.chat(chats, params, progress=False)
        else:
            outputs = llm.generate(prompts, params, progress=False)
        return {"tokens": [output.outputs[0].token_ids for output in outputs]}

    return generate


if __name__ == "__main__":
    serve(start, "opgraft")
