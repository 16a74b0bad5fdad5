"""``Embedder``: texts in, vectors out, with an encoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from opgraft.binding.blame import UNEXPLAINED, verdicts_on
from opgraft.binding.explaining import Explanation
from opgraft.binding.pluggable_class import choose_class
from opgraft.config import OpgraftConfig
from opgraft.engine.compiled_model import expect_compilable
from opgraft.engine.executors import executor_of
from opgraft.engine.stats import Counters, EngineStats, copied
from opgraft.engine.worker import Worker
from opgraft.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    OpgraftError,
    PluginError,
)
from opgraft.models.config import read_config
from opgraft.models.files import open_weights, opened_once
from opgraft.models.sentences import SentenceSettings
from opgraft.serving.arguments import placed
from opgraft.serving.outputs import EmbeddingOutput
from opgraft.serving.prompts import Prompt, tokenized, unsalted
from opgraft.serving.replicas import is_replicated
from opgraft.serving.step_reports import OnStep, StepReports
from opgraft.serving.tokenizer import Tokenizer, open_tokenizer

_LONGEST = 512
"""Tokens of the longest text, where neither settings nor checkpoint say."""
_NAMED = 3
"""Texts that an error names, at most."""


@dataclass(frozen=True)
class Embedded:
    """The vector of a text, and what is wrong if it has NaN or infinity.

    Attributes:
        vector: the numbers.
        fault: the kernel that is to blame; ``"unexplained"`` if none is, with a replaced class if one is in use.
    """

    vector: list[float]
    fault: str = ""


class Embedder:
    """An encoder with its tokenizer.

    Args:
        opgraft_config: ``scheduler`` says how many texts and tokens a batch has at most.
        on_step: see ``OnStep``; called after each batch.

    Attributes:
        waiting: texts that are in no batch yet, which statistics show.

    Raises:
        ModelError: no model is named, or it cannot be made.
        ConfigError: ``parallel.data`` is above 1, ``model.max_model_len`` is more than there are positions, the devices
            cannot compute the split, or the encoder cannot be compiled as ``compilation_config`` says.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, opgraft_config: OpgraftConfig, on_step: OnStep | None = None) -> None:
        self.opgraft_config = opgraft_config.resolved()
        _expect_one(self.opgraft_config)
        worker: type[Worker] = choose_class(Worker).cls
        worker.expect_split(self.opgraft_config.parallel)
        expect_compilable(self.opgraft_config)
        with opened_once(), ExitStack() as undo:
            self.executor = executor_of(self.opgraft_config)
            undo.callback(self.executor.shutdown)
            self.executor.start()
            self.executor.call("load_encoder")
            weights = open_weights(str(self.opgraft_config.model.name))
            self.settings = SentenceSettings.of(weights)
            self.tokenizer: Tokenizer = open_tokenizer(weights)
            if self.settings.lower_case:
                self.tokenizer.lower_case()
            self.vocab_size = int(read_config(weights).get_text_config().vocab_size)
            self.max_tokens = self._longest()
            undo.pop_all()  # nothing raised: the worker stays
        self.counters = Counters()
        self._shut_down = False
        self._running = self.waiting = 0
        self._reports = StepReports(self.stats, on_step)

    def _longest(self) -> int:
        """Return the tokens of the longest text: as set, or as the checkpoint says of its sentences."""
        there, asked = self.executor.call("max_context"), self.opgraft_config.model.max_model_len
        if asked is None:
            return min(
                (limit for limit in (there, self.settings.max_tokens) if limit is not None),
                default=_LONGEST,
            )
        if there is not None and there < asked:
            raise ConfigError(
                f"model.max_model_len is {asked}, and the encoder {self.opgraft_config.model.name} has positions for "
                f"{there} tokens: set it to at most {there}"
            )
        return asked

    def stats(self) -> EngineStats:
        """Return a snapshot of what runs and of the counters, from any thread; there is no cache."""
        return EngineStats(
            running=self._running,
            waiting=self.waiting,
            blocks_used=0,
            num_blocks=0,
            counters=copied(self.counters),
        )

    def explain(self) -> Explanation:
        """Tell which kernel runs each op of the model, and of which classes the parts around it are, and why."""
        explained: Explanation = self.executor.call("explain")
        return explained.within(executor=self.executor)

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        truncate: bool,
        ended: Callable[[int], None] = lambda more: None,
    ) -> list[EmbeddingOutput]:
        """Return the vector of each text, in their order; texts of like length share a batch.

        Args:
            texts: each as text or token ids.
            truncate: cut texts that are too long, instead of refusing them.
            ended: called with the number of texts that a batch has had.

        Raises:
            RequestError: a text cannot be taken.
            CheckpointError, PluginError: vectors of texts have NaN or infinity.
        """
        with self.counters.timed("text"):
            names = [placed("text", index, len(texts)) for index in range(len(texts))]
            given = [self._tokenized(*named, truncate) for named in zip(texts, names, strict=True)]
        found: dict[int, Embedded] = {}
        left = len(given)
        try:
            for batch in self.batches([len(ids) for _, ids in given]):
                left -= len(batch)
                self.waiting = left
                sequences = [given[index][1] for index in batch]
                found.update(zip(batch, self.vectors(sequences), strict=True))
                ended(len(batch))
        finally:
            self.waiting = 0
        faults = {names[i]: each.fault for i, each in sorted(found.items()) if each.fault}
        if faults:
            raise self.refusal(faults)
        return [
            EmbeddingOutput(str(i), text, ids, found[i].vector)
            for i, (text, ids) in enumerate(given)
        ]

    def encode(self, text: Prompt, name: str) -> list[int]:
        """Return the token ids of a text, from any thread; ``name`` is what errors call it.

        Raises:
            RequestError: it cannot be taken.
        """
        return self._tokenized(text, name, truncate=False)[1]

    def restart(self) -> None:
        """Start workers that are lost again, as often as that is allowed."""
        if self.executor.can_restart:
            self.executor.restart(lambda: self.executor.call("load_encoder"))

    def vectors(self, sequences: Sequence[Sequence[int]]) -> list[Embedded]:
        """Compute the vectors of a batch of token ids, check them, and count the batch.

        Raises:
            EngineError: the encoder was shut down.
        """
        if self._shut_down:
            raise EngineError("the encoder was shut down: make a new one")
        self.restart()
        self.counters.steps += 1
        self._running, reason = len(sequences), "error"
        try:
            with self.counters.timed("model"):
                vectors: list[list[float]] = self.executor.call(
                    "embed", sequences, self.settings.pooling, self.settings.normalize
                )
                size = self.settings.size
                embedded = self._checked(sequences, [vector[:size] for vector in vectors])
            reason = "stop"
            self.counters.prompt_tokens += sum(map(len, sequences))
        finally:
            self._running = 0
            self.counters.failed_steps += reason == "error"
            self.counters.finished[reason] += len(sequences)
            self._reports.send()
        return embedded

    def _checked(
        self, sequences: Sequence[Sequence[int]], vectors: Sequence[list[float]]
    ) -> list[Embedded]:
        """Return the vectors of a batch, with the fault of each that has NaN or infinity."""
        wrong = []
        for number, vector in enumerate(vectors):
            if not all(map(math.isfinite, vector)):
                wrong.append(number)
        faults = [""] * len(vectors)
        verdicts = self._verdicts([sequences[number] for number in wrong], sequences)
        for number, verdict in zip(wrong, verdicts, strict=True):
            faults[number] = verdict
        return [Embedded(*row) for row in zip(vectors, faults, strict=True)]

    def _verdicts(
        self, wrong: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return what is wrong with some texts of a batch."""
        verdicts = verdicts_on(
            lambda index: self.executor.call("wrong_kernel", [wrong[index]]), len(wrong)
        )
        if "" in verdicts and len(batch) > 1:
            # A kernel may be wrong for several texts at a time only.
            together: str = self.executor.call("wrong_kernel", batch)
            verdicts = [verdict or together for verdict in verdicts]
        if not {"", UNEXPLAINED}.isdisjoint(verdicts):
            replaced: str = self.executor.call("replaced_class")
            unexplained = f"{UNEXPLAINED}: {replaced}" if replaced else UNEXPLAINED
            verdicts = [unexplained if each in ("", UNEXPLAINED) else each for each in verdicts]
        return verdicts

    def _tokenized(self, text: Prompt, name: str, truncate: bool) -> tuple[str | None, list[int]]:
        """Return the text as given, and the token ids of the checkpoint's prompt and the text."""
        given, _ = unsalted(text, name)
        shown = given if isinstance(given, str) else None
        prompted = given if shown is None else self.settings.prompt + shown
        _, ids = tokenized(
            prompted,
            self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=self.max_tokens,
            room=0,
            name=name,
            truncate=truncate,
            advice=", or have LLM.embed cut it with truncate=True",
        )
        return shown, ids

    def shutdown(self) -> None:
        """Let go of the model; texts that are given afterwards are refused."""
        self._shut_down = True
        self.executor.shutdown()

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of texts in batches, the shortest first."""
        scheduler = self.opgraft_config.scheduler
        batch: list[int] = []
        tokens = 0
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            full = (
                len(batch) == scheduler.max_num_seqs
                or tokens + lengths[index] > scheduler.max_num_batched_tokens
            )
            if batch and full:
                yield batch
                batch, tokens = [], 0
            batch.append(index)
            tokens += lengths[index]
        if batch:
            yield batch

    def refusal(self, faults: Mapping[str, str]) -> OpgraftError:
        """Return the error of texts that have no embedding.

        Args:
            faults: what is wrong, by the names of the texts.

        Returns:
            A ``PluginError`` if the kernel of a plugin is to blame for a text, else a ``CheckpointError``.
        """
        model = self.opgraft_config.model
        texts: dict[str, list[str]] = {}
        first: dict[str, str] = {}
        for name, fault in faults.items():
            # What follows are numbers of a single text; those of the first do for all.
            kernel = fault.partition(": ")[0]
            texts.setdefault(kernel, []).append(name)
            first.setdefault(kernel, fault)
        parts = []
        # The advice for a kernel stands last, where a reader looks for the next step.
        for kernel in sorted(texts, key=UNEXPLAINED.__ne__):
            reason = self._unexplained(first[kernel]) if kernel == UNEXPLAINED else first[kernel]
            parts.append(f"for {_listed(texts[kernel])}: {reason}")
        message = f"{model.name} computes numbers that are no embedding (NaN or infinity) "
        message += " And ".join(parts)
        known = texts.keys() - {UNEXPLAINED}
        return PluginError(message) if known else CheckpointError(message)

    def _unexplained(self, fault: str) -> str:
        """Return the reason of texts for which no kernel is to blame."""
        dtype = self.opgraft_config.model.dtype
        reason = (
            f"its weights are damaged, or {dtype} is too narrow for them. Try the dtype float32."
        )
        _, _, replaced = fault.partition(": ")
        return f"{reason} Besides, {replaced}" if replaced else reason


def _listed(names: Sequence[str]) -> str:
    """Name some texts, and count the others."""
    if len(names) <= _NAMED:
        return ", ".join(names)
    shown = ", ".join(names[: _NAMED - 1])
    return f"{shown} and {len(names) - _NAMED + 1} more"


def _expect_one(opgraft_config: OpgraftConfig) -> None:
    replicas, name = opgraft_config.parallel.data, opgraft_config.model.name
    if is_replicated(opgraft_config.parallel):
        raise ConfigError(
            f"parallel.data is {replicas}, and {name} is an encoder, which runs as one engine: leave it out, and start "
            "a server for each device"
        )
