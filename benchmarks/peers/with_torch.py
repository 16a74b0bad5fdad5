"""An import of torch and no engine: the time that every start on torch takes."""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  # the import is measured
from protocol import Answer, Generate, serve


def start(checkpoint: str, dtype: str) -> Generate:
    def generate(prompts: list[Any], max_tokens: int) -> Answer:
        return {"tokens": [[] for _ in prompts]}

    return generate


if __name__ == "__main__":
    serve(start, "torch")
