"""Running a checkpoint on text, plain and grafted: sentence embeddings or greedy generation."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.binding.specialisation import op_name_of
from opgraft.checkpoint import Checkpoint
from opgraft.config import OpgraftConfig, set_config
from opgraft.errors import InputError
from opgraft.grafting import GraftReport, graft, ungraft
from opgraft.ops.linear.weight_cache import freeze
from opgraft.plugins.discovery import discover
from opgraft.plugins.host import load_plugins
from opgraft.plugins.selection import current_platform
from opgraft.pooling import pooled
from opgraft.state import host_state
from torch import nn
from torch.nn import functional as F

BATCH = 32
"""Sentences in a batch."""
NEW_TOKENS = 24
"""Tokens generated per prompt."""
ROUNDS = 5
"""Rounds of a comparison; plain and grafted take turns and the medians count."""

_MOST_SIMILARITIES = 1 << 24
"""Similarities held at a time, 64 MiB of them; those of 40,000 sentences would be 6 GiB."""
_USUAL_LIMIT = 512
_NO_LIMIT = 10**9  # transformers writes 10**30 where a tokenizer knows no limit

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Output:
    """The result of a run: ``numbers`` to compare (a float32 tensor) and ``answers``, one per text."""

    numbers: torch.Tensor
    answers: list[str]


@dataclass(frozen=True)
class Side:
    """One way of running the model.

    Attributes:
        name: ``plain``, ``bare``, which is grafted with every op's own class, or ``grafted`` with what plugins bring.
        seconds: the median over the rounds.
        largest_difference: from the numbers of the plain model, absolute.
        same_answers: whether its answers are those of the plain model.
    """

    name: str
    seconds: float
    largest_difference: float
    same_answers: bool


@dataclass(frozen=True)
class Comparison:
    """Plain against grafted, and against ``bare`` where a plugin's replacement is active.

    The first four hold what ``sides`` says of the model as it is left, grafted with all that is installed.
    """

    largest_difference: float
    plain_seconds: float
    grafted_seconds: float
    same_answers: bool
    sides: tuple[Side, ...]

    @classmethod
    def of(cls, sides: Sequence[Side]) -> Comparison:
        plain, last = sides[0], sides[-1]
        return cls(last.largest_difference, plain.seconds, last.seconds, last.same_answers, tuple(sides))


class Runner(ABC):
    """A loaded model, on the platform's device, that turns texts into an ``Output``."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(current_platform().device_type)
        model, self.tokenizer = checkpoint.load(dtype)
        self.model: nn.Module = model.to(self.device)
        self.limit = longest_input(self.model, self.tokenizer)

    @abstractmethod
    def run(self, texts: Sequence[str], progress: Progress, label: str) -> Output:
        """Compute the answers for all texts."""

    def _checked(self, numbers: torch.Tensor, text: str, label: str) -> torch.Tensor:
        """Check the numbers of one text, -inf among them perhaps, where a model rules a token out.

        Raises:
            InputError: they are no answer.
        """
        if bool((numbers < torch.inf).all()) and bool(numbers.isfinite().any()):
            return numbers
        raise InputError(
            f"{self.checkpoint.folder} computes numbers that are no answer (NaN or infinity) for {text!r:.60} "
            f"({label}): its weights are damaged, or {self.model.dtype} is too narrow for them. Try --dtype float32, "
            "and --compare, which runs the model ungrafted first."
        )

    def graft(self) -> GraftReport:
        """Graft the model, whose weights nobody writes to here."""
        report = graft(self.model)
        freeze(self.model)
        return report

    def compare(self, texts: Sequence[str], progress: Progress) -> tuple[Output, GraftReport, Comparison]:
        """Run plain, bare and grafted in turns, in the other order every other round; the model is left grafted."""
        own = own_classes_config()
        names = ["plain", "bare", "grafted"] if own.providers else ["plain", "grafted"]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        outputs: dict[str, Output] = {}
        self.run(texts[:BATCH], progress, "warming up")
        for turn in range(ROUNDS):
            for name in names[:: 1 if turn % 2 == 0 else -1]:
                with set_config(own if name == "bare" else OpgraftConfig()):
                    if name != "plain":
                        self.graft()
                    self.run(texts[:BATCH], progress, f"{name}, warming up")  # weights may be packed on first use
                    start = time.perf_counter()
                    outputs[name] = self.run(texts, progress, f"{name}, round {turn + 1} of {ROUNDS}")
                    seconds[name].append(time.perf_counter() - start)
                ungraft(self.model)
        report = self.graft()
        plain = outputs["plain"]
        sides = [
            Side(
                name,
                statistics.median(seconds[name]),
                _largest_difference(plain.numbers, output.numbers),
                plain.answers == output.answers,
            )
            for name, output in ((name, outputs[name]) for name in names)
        ]
        return outputs["grafted"], report, Comparison.of(sides)


class Encoder(Runner):
    """Sentence embeddings; the answer to a text is the text nearest to it by cosine similarity."""

    @torch.inference_mode()
    def run(self, texts: Sequence[str], progress: Progress, label: str) -> Output:
        # Texts of like length share a batch, which then has little padding.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        rows: list[torch.Tensor] = [torch.empty(0)] * len(texts)
        for start in range(0, len(order), BATCH):
            progress(label, start, len(order))
            batch = order[start : start + BATCH]
            for index, embedding in zip(batch, self._embed([texts[index] for index in batch]), strict=True):
                rows[index] = self._checked(embedding, texts[index], label)
        progress(label, len(order), len(order))
        embeddings = torch.stack(rows)
        return Output(embeddings, [texts[index] for index in nearest(embeddings)])

    def _embed(self, texts: list[str]) -> torch.Tensor:
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": self.limit}
        tokens = self.tokenizer(texts, return_tensors="pt", **options).to(self.device)
        states = self.model(**tokens).last_hidden_state
        return F.normalize(pooled(states, tokens["attention_mask"], self.checkpoint.pooling), dim=-1).cpu()


class Generator(Runner):
    """Greedy generation through transformers; the numbers compared are the logits of each prompt's last token."""

    @torch.inference_mode()
    def run(self, texts: Sequence[str], progress: Progress, label: str) -> Output:
        logits, answers = [], []
        model: Any = self.model
        new = min(NEW_TOKENS, self.limit // 2)
        self.tokenizer.truncation_side = "left"  # what is generated continues the end of the prompt
        options: dict[str, Any] = {"truncation": True, "max_length": self.limit - new, "return_token_type_ids": False}
        for done, text in enumerate(texts):
            progress(label, done, len(texts))
            tokens = self.tokenizer(text, return_tensors="pt", **options).to(self.device)
            logits.append(self._checked(model(**tokens).logits[0, -1].float().cpu(), text, label))
            generated = model.generate(**tokens, max_new_tokens=new, do_sample=False)
            answers.append(
                self.tokenizer.decode(generated[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
            )
        progress(label, len(texts), len(texts))
        return Output(torch.stack(logits), answers)


def open_runner(checkpoint: Checkpoint, dtype: torch.dtype) -> Runner:
    """Open the runner for a checkpoint's architecture."""
    return Generator(checkpoint, dtype) if checkpoint.causal else Encoder(checkpoint, dtype)


def own_classes_config() -> OpgraftConfig:
    """Return settings under which every op that an active replacement stands in for keeps its own class."""
    load_plugins()
    state = host_state()
    targets = [r.target for r in state.active if r.target is not None]
    owners = {op_name_of(target, state): discover().provider_of(target.__module__).name for target in targets}
    return OpgraftConfig(providers={name: owner for name, owner in owners.items() if name is not None})


def longest_input(model: nn.Module, tokenizer: Any) -> int:
    """Return how many tokens a text may have, by the limits of both the tokenizer and the model's table of positions.

    Models in the manner of RoBERTa count positions from behind the one of padding, so that the first rows of their
    table serve no token.
    """
    config: Any = model.config
    positions = getattr(config, "max_position_embeddings", None)
    tables = [
        table
        for path, table in model.named_modules()
        if isinstance(table, nn.Embedding) and "position" in path and table.num_embeddings == positions
    ]
    unused = max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)
    limits = (tokenizer.model_max_length, positions - unused if isinstance(positions, int) else None)
    known = [limit for limit in limits if isinstance(limit, int) and 0 < limit < _NO_LIMIT]
    return min(known, default=_USUAL_LIMIT)


def nearest(embeddings: torch.Tensor) -> list[int]:
    """Find, for each row of unit vectors ``[n, d]``, the other row nearest by cosine; its own index where n is 1."""
    found: list[int] = []
    rows = max(1, _MOST_SIMILARITIES // max(1, len(embeddings)))
    for start in range(0, len(embeddings), rows):
        similarity = embeddings[start : start + rows] @ embeddings.T
        if len(embeddings) > 1:
            similarity.diagonal(start).fill_(-torch.inf)
        found += similarity.argmax(dim=1).tolist()
    return found


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return torch.where(one == other, 0, (one - other).abs()).max().item()  # infinite numbers may be equal
