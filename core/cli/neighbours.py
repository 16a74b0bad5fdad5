"""The answers of ``opgraft run ENCODER TEXT…``: for each text the one that is nearest to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft.cli.output import echo, print_json
from opgraft.plugins.selection import current_platform, selected_platform
from opgraft.runner import nearest
from opgraft.serving.llm import LLM
from opgraft.text import printable
from torch.nn import functional


def show_neighbours(llm: LLM, model: str, texts: Sequence[str], as_json: bool) -> None:
    """Embed texts, and print for each the nearest other one by cosine similarity.

    Raises:
        RequestError: the model computes no numbers for a text.
    """
    vectors = [output.embedding for output in llm.embed(texts, truncate=True)]
    neighbours = nearest(functional.normalize(torch.tensor(vectors), dim=-1))
    if as_json:
        rows = [
            {"text": text, "nearest": texts[other], "embedding": vector}
            for text, other, vector in zip(texts, neighbours, vectors, strict=True)
        ]
        platform, decision = current_platform().name, selected_platform().decision.to_dict()
        data = {"model": model, "platform": platform, "decision": decision, "embeddings": rows}
        print_json("opgraft.embeddings/1", {**data, **llm.explain().to_dict()})
        return
    for text, other in zip(texts, neighbours, strict=True):
        echo(f"{printable(text)}\n  -> {printable(texts[other])}")
