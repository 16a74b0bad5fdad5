"""CTranslate2's generator: all requests are one batch."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

from convert import NEVER_CHOSEN
from protocol import Answer, Generate, serve

engine: Any = importlib.import_module("ctranslate2")


def start(checkpoint: str, dtype: str) -> Generate:
    names = json.loads(Path(checkpoint, "vocabulary.json").read_text(encoding="utf-8"))
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    generator = engine.Generator(checkpoint, compute_type=dtype, intra_threads=threads)

    def generate(prompts: list[list[int]], max_tokens: int) -> Answer:
        results = generator.generate_batch(
            [[names[token] for token in prompt] for prompt in prompts],
            min_length=max_tokens,
            max_length=max_tokens,
            end_token=[names[NEVER_CHOSEN]],
            include_prompt_in_result=False,
        )
        return {"tokens": [result.sequences_ids[0] for result in results]}

    return generate


if __name__ == "__main__":
    serve(start, "ctranslate2")
