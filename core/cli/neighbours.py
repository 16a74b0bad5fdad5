"""The answers of ``opgraft run ENCODER TEXT…``: for each text, the nearest other text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from opgraft.base.text import printable
from opgraft.cli.answer import print_kernels
from opgraft.cli.comparison import Measurement, ModelComparison, timed
from opgraft.cli.output import echo, print_json
from opgraft.plugins.selection import current_platform, selected_platform
from opgraft.serving.llm import LLM
from torch import Tensor
from torch.nn import functional

_SHOWN = 6
"""Texts to show with their nearest ones, at most."""
_MOST_SIMILARITIES = 1 << 24
"""Similarities in memory at a time: 64 MiB. All similarities of 40,000 texts would take 6 GiB."""


def measure_vectors(llm: LLM, texts: Sequence[str]) -> Measurement:
    """Embed texts and measure the time, without the preparations of the first call.

    Raises:
        RequestError: the model computes no numbers for a text.
    """
    # The first call prepares kernels and memory, so its time does not count.
    llm.embed(texts, truncate=True)
    outputs, seconds = timed(lambda: llm.embed(texts, truncate=True))
    vectors = torch.tensor([output.embedding for output in outputs])
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return Measurement(vectors, nearest(vectors), tokens, seconds)


def show_neighbours(
    llm: LLM,
    model: str,
    texts: Sequence[str],
    as_json: bool,
    comparison: ModelComparison | None = None,
) -> None:
    """Embed texts. Print the nearest other text of each by cosine similarity, and the kernels.

    Raises:
        RequestError: the model computes no numbers for a text.
    """
    vectors = [output.embedding for output in llm.embed(texts, truncate=True)]
    neighbours = nearest(torch.tensor(vectors))
    if as_json:
        rows = []
        for text, other, vector in zip(texts, neighbours, vectors, strict=True):
            row = {"text": text, "nearest": texts[other], "embedding": vector}
            rows.append(row)
        data = {
            "model": model,
            "platform": current_platform().name,
            "decision": selected_platform().decision.to_dict(),
            "embeddings": rows,
            "comparison": comparison.to_dict() if comparison else None,
            **llm.explain().to_dict(),
        }
        print_json("opgraft.embeddings/1", data)
        return
    _print_texts(texts, neighbours)
    echo()
    print_kernels(llm)
    if comparison:
        echo()
        comparison.print()


def _print_texts(texts: Sequence[str], neighbours: Sequence[int]) -> None:
    """Print some texts, each with its neighbour."""
    pairs = zip(texts, neighbours, strict=True)
    for text, other in islice(pairs, _SHOWN):
        beside = f"-> {printable(texts[other])}"
        if len(texts) == 1:
            beside = "(there is no other text to compare it with)"
        echo(printable(text))
        echo(f"  {beside}")
    if len(texts) > _SHOWN:
        echo(f"and {len(texts) - _SHOWN} more, which --json has all of")


def nearest(embeddings: Tensor) -> list[int]:
    """Return the nearest other row by cosine for each row of ``[n, d]``; for n = 1, row 0."""
    units = functional.normalize(embeddings, dim=-1)
    found: list[int] = []
    rows = max(1, _MOST_SIMILARITIES // max(1, len(units)))
    for start in range(0, len(units), rows):
        similarity = units[start : start + rows] @ units.T
        # A text is most similar to itself.
        if len(units) > 1:
            similarity.diagonal(start).fill_(-torch.inf)
        found += similarity.argmax(dim=1).tolist()
    return found
