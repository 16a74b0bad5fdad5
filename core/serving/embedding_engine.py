"""``EmbeddingEngine``: texts in, vectors out, a batch of an encoder at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from opgraft.base.text import described
from opgraft.binding.blame import UNEXPLAINED, verdicts_on
from opgraft.binding.explaining import Explanation
from opgraft.binding.pluggable_class import choose_class
from opgraft.config import OpgraftConfig
from opgraft.engine.core import exceptions_that_fail_a_step
from opgraft.engine.runner.changed_weights import blames_no_plugin
from opgraft.engine.runner.compiled_model import expect_compilable
from opgraft.engine.stats import Counters, EngineStats, copied
from opgraft.engine.workers.executors import executor_of
from opgraft.engine.workers.worker import Worker
from opgraft.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    ModelError,
    OpgraftError,
    PluginError,
)
from opgraft.models.config import read_config
from opgraft.models.files import open_weights, opened_once
from opgraft.models.sentences import SentenceSettings
from opgraft.serving.open_request import OpenRequest, id_in_use, none_open
from opgraft.serving.outputs import EmbeddingOutput, RequestOutput
from opgraft.serving.prompts import Prompt, tokenized, unsalted
from opgraft.serving.request_engine import RequestEngine
from opgraft.serving.step_reports import OnStep, StepReports
from opgraft.serving.tokenizer import Tokenizer, open_tokenizer

_LONGEST = 512
"""Tokens of the longest text, if neither settings nor checkpoint give a number."""
_NAMED = 3
"""Names of texts in an error, at most."""


@dataclass
class VectorRequest(OpenRequest):
    """A request for the vector of a text, without answers.

    Attributes:
        name: of the text, for errors.
        second: the place of the second text in a pair; None if the vector is an embedding, and the
            length for the labels of a single text.
        vector: the numbers, once computed.
        fault: the kernel to blame if the vector has NaN or infinity. If no kernel is to blame,
            ``"unexplained"``, followed by a replaced class if one is in use.
        error: raised by the batch of the text.
    """

    name: str = ""
    second: int | None = None
    vector: Sequence[float] = ()
    fault: str = ""
    error: Exception | None = None

    @property
    def ids(self) -> list[int]:
        """The token ids of the text."""
        return self.output.prompt_token_ids

    def abort(self) -> None:
        """End a text that was in no batch."""
        self.error = EngineError(f"{self.name} was aborted before it was in a batch")
        super().abort()

    @property
    def is_answered(self) -> bool:
        """True if there is a vector."""
        return self.output.finished and self.error is None


class EmbeddingEngine(RequestEngine):
    """An encoder with its tokenizer.

    Each batch has the text with the longest wait, and texts of similar length.

    Args:
        opgraft_config: ``scheduler`` limits the texts and tokens of a batch.
        on_step: see ``OnStep``; called after each batch.

    Raises:
        ModelError: no model is named, or the model cannot be made.
        ConfigError: ``model.max_model_len`` exceeds the positions of the model, the devices cannot
            compute the split, the encoder cannot be compiled, or ``lora.enabled`` is set.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, opgraft_config: OpgraftConfig, on_step: OnStep | None = None) -> None:
        self.opgraft_config = opgraft_config.resolved()
        if self.opgraft_config.lora.enabled:
            raise ConfigError(
                f"lora.enabled is set, and {self.opgraft_config.model.name} is an encoder, which "
                "takes no adapters: leave it out, or merge the adapter into the encoder"
            )
        worker: type[Worker] = choose_class(Worker).cls
        worker.expect_split(self.opgraft_config.parallel)
        expect_compilable(self.opgraft_config)
        with opened_once(), ExitStack() as undo:
            self.executor = executor_of(self.opgraft_config)
            undo.callback(self.executor.shutdown)
            self.executor.start()
            self.executor.call("load_encoder")
            self.labels: Sequence[str] = self.executor.call("labels")
            weights = open_weights(str(self.opgraft_config.model.name))
            self.settings = SentenceSettings.of(weights, has_labels=bool(self.labels))
            self.tokenizer: Tokenizer = open_tokenizer(weights)
            if self.settings.lower_case:
                self.tokenizer.lower_case()
            self.vocab_size = int(read_config(weights).get_text_config().vocab_size)
            self.max_model_len = self._longest()
            # Nothing raised, so the worker stays.
            undo.pop_all()
        self.counters = Counters()
        self._shut_down = False
        self._running = 0
        self._waiting: dict[str, VectorRequest] = {}
        self._reports = StepReports(self.stats, on_step)

    def _longest(self) -> int:
        """Return the tokens of the longest text, from settings or from the checkpoint."""
        there: int | None = self.executor.call("max_context")
        asked = self.opgraft_config.model.max_model_len
        if asked is None:
            # Many checkpoints were trained on shorter texts than their positions allow.
            limits = [limit for limit in (there, self.settings.max_tokens) if limit is not None]
            return min(limits, default=_LONGEST)
        if there is not None and there < asked:
            raise ConfigError(
                f"model.max_model_len is {asked}, and the encoder {self.opgraft_config.model.name} "
                f"has positions for {there} tokens: set it to at most {there}"
            )
        return asked

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._running,
            waiting=len(self._waiting),
            blocks_used=0,
            num_blocks=0,
            counters=copied(self.counters),
        )

    def explain(self) -> Explanation:
        explained: Explanation = self.executor.call("explain")
        return explained.within(executor=self.executor)

    def capacity(self) -> str:
        return f"none, as it is an encoder; the longest text has {self.max_model_len:,} tokens"

    def prepare(
        self,
        request_id: str,
        text: Prompt,
        name: str,
        *,
        most: int | None = None,
        advice: str = "",
    ) -> VectorRequest:
        """Check and tokenize a text for ``submit``. Any thread may call this.

        Args:
            request_id: unique among open requests.
            text: text or token ids.
            name: of the text, for errors.
            most: tokens of a longer text are cut off. None: a text that is too long is refused.
            advice: a further remedy for a text that is too long.

        Raises:
            RequestError: the text is empty, too long, or of a wrong type.
        """
        shown, ids = self._tokenized(text, name, most, advice)
        return VectorRequest(RequestOutput(request_id, shown, ids, []), {}, name=name)

    def prepare_labels(
        self,
        request_id: str,
        text: Prompt,
        name: str,
        *,
        second: str | None = None,
        most: int | None = None,
    ) -> VectorRequest:
        """Check and tokenize a text, or a pair of texts, for the probabilities of labels.

        Args:
            request_id: unique among open requests.
            text: text or token ids; of a pair, the first text.
            name: of the text, for errors.
            second: the other text of a pair.
            most: as for ``prepare``. Of a pair, the second text is cut.

        Raises:
            ModelError: the model has no labels.
            RequestError: the text is empty, too long, or of a wrong type.
        """
        self.expect_labels()
        if second is None or not isinstance(text, str):
            request = self.prepare(request_id, text, name, most=most)
            request.second = len(request.ids)
            return request
        ids, place = self.tokenizer.encode_pair(text, second, most)
        request = self.prepare(request_id, ids, name)
        request.second = place
        return request

    def expect_labels(self) -> None:
        """Check that the model tells labels apart.

        Raises:
            ModelError: the model has vectors alone.
        """
        if not self.labels:
            raise ModelError(
                f"{self.opgraft_config.model.name} is an encoder without a head for labels: use a "
                "checkpoint of the architecture BertForSequenceClassification, "
                "RobertaForSequenceClassification or XLMRobertaForSequenceClassification"
            )

    def results(self, requests: Sequence[VectorRequest]) -> list[EmbeddingOutput]:
        """Return the vectors of ended requests.

        Raises:
            CheckpointError, PluginError: vectors have NaN or infinity.
            Exception: raised by the batch of a text.
        """
        for request in requests:
            if request.error is not None:
                raise request.error
        faults = {request.name: request.fault for request in requests if request.fault}
        if faults:
            raise self._refusal(faults)
        outputs = []
        for number, request in enumerate(requests):
            vector = list(request.vector)
            outputs.append(EmbeddingOutput(str(number), request.output.prompt, request.ids, vector))
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def submit(self, prepared: OpenRequest) -> RequestOutput:
        request_id = prepared.output.request_id
        self._expect_going()
        if request_id in self._waiting:
            raise id_in_use(request_id)
        if not isinstance(prepared, VectorRequest):
            raise EngineError(f"request {request_id!r} asks an encoder for text: use LLM.embed")
        self._waiting[request_id] = prepared
        return prepared.output

    def abort(self, request_id: str) -> RequestOutput:
        if request_id not in self._waiting:
            raise none_open(request_id)
        request = self._waiting.pop(request_id)
        request.abort()
        return request.output

    def step(self) -> list[RequestOutput]:
        """Compute the next batch, and return the outputs of its texts.

        If a batch of several texts raises an error, each text is computed alone. So only the text
        with the fault has no vector.
        """
        batch = self._next()
        self._settle(batch)
        for request in batch:
            request.output.finished = True
        return [request.output for request in batch]

    def _next(self) -> list[VectorRequest]:
        """Take the texts of the next batch off the waiting ones: all for vectors, or for labels."""
        waiting = list(self._waiting.values())
        # Text 0 has waited longest.
        wants_labels = bool(waiting) and waiting[0].second is not None
        waiting = [each for each in waiting if (each.second is not None) == wants_labels]
        chosen: list[int] = []
        for indices in self._batches([len(request.ids) for request in waiting]):
            if 0 in indices:
                chosen = indices
                break
        batch = [waiting[index] for index in sorted(chosen)]
        for request in batch:
            del self._waiting[request.output.request_id]
        return batch

    def _settle(self, batch: Sequence[VectorRequest]) -> None:
        """Give each text of a batch a vector or an error."""
        try:
            self._compute(batch)
        except exceptions_that_fail_a_step() as error:
            if len(batch) == 1:
                batch[0].error = _raisable(error, batch[0].name)
                self.counters.finished["error"] += 1
                return
            # One bad text must not fail the texts of other callers.
            for request in batch:
                self._settle([request])

    def _compute(self, batch: Sequence[VectorRequest]) -> None:
        """Compute the vectors of a batch, check them, and count the batch."""
        self._expect_going()
        self.revive()
        self.counters.steps += 1
        self._running = len(batch)
        failed = True
        try:
            with self.counters.timed("model"):
                self._take(batch, self._vectors(batch))
            failed = False
        finally:
            self._running = 0
            if failed:
                self.counters.failed_steps += 1
            else:
                self.counters.prompt_tokens += sum(len(request.ids) for request in batch)
                self.counters.finished["stop"] += len(batch)
            self._reports.send()

    def _vectors(self, batch: Sequence[VectorRequest]) -> list[list[float]]:
        """Return an embedding for each text of a batch, or the probabilities of the labels."""
        ids = [request.ids for request in batch]
        places = [request.second for request in batch if request.second is not None]
        vectors: list[list[float]]
        if places:
            vectors = self.executor.call("classify", ids, places)
        else:
            settings = self.settings
            vectors = self.executor.call("embed", ids, settings.pooling, settings.normalize)
        return vectors

    def revive(self) -> None:
        if self.executor.can_restart:
            self.executor.restart(lambda: self.executor.call("load_encoder"))

    def check_health(self) -> None:
        self._expect_going()
        self.executor.check_health()

    def _expect_going(self) -> None:
        if self._shut_down:
            raise EngineError("the encoder was shut down: make a new one")

    def _take(self, batch: Sequence[VectorRequest], vectors: Sequence[list[float]]) -> None:
        """Give each text of a batch the vector, and the fault if the vector has NaN or infinity."""
        wrong = []
        for request, vector in zip(batch, vectors, strict=True):
            has_labels = request.second is not None
            # The setting shortens embeddings, and every label has a probability.
            request.vector = vector if has_labels else vector[: self.settings.size]
            if not all(map(math.isfinite, request.vector)):
                wrong.append(request)
        ids_of_wrong = [request.ids for request in wrong]
        ids_of_batch = [request.ids for request in batch]
        verdicts = self._verdicts(ids_of_wrong, ids_of_batch)
        for request, verdict in zip(wrong, verdicts, strict=True):
            request.fault = verdict

    def _verdicts(
        self, wrong: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return a verdict for each wrong text of a batch: the kernel to blame, or unexplained."""

        def verdict_alone(index: int) -> str:
            verdict: str = self.executor.call("wrong_kernel", [wrong[index]])
            return verdict

        verdicts = verdicts_on(verdict_alone, len(wrong))
        if "" in verdicts and len(batch) > 1:
            # A kernel may be wrong for several texts at a time only.
            together: str = self.executor.call("wrong_kernel", batch)
            verdicts = [verdict or together for verdict in verdicts]
        if not {"", UNEXPLAINED}.isdisjoint(verdicts):
            replaced: str = self.executor.call("replaced_class")
            unexplained = f"{UNEXPLAINED}: {replaced}" if replaced else UNEXPLAINED
            verdicts = [unexplained if each in ("", UNEXPLAINED) else each for each in verdicts]
        return verdicts

    def _tokenized(
        self, text: Prompt, name: str, most: int | None, advice: str
    ) -> tuple[str | None, list[int]]:
        """Return the given text, and the token ids of the checkpoint's prompt and the text."""
        given, _ = unsalted(text, name)
        shown = given if isinstance(given, str) else None
        prompted = given if shown is None else self.settings.prompt + shown
        if most is not None and isinstance(prompted, list):
            prompted = prompted[:most]
        _, ids = tokenized(
            prompted,
            self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=most or self.max_model_len,
            room=0,
            name=name,
            truncate=most is not None,
            advice=advice,
        )
        return shown, ids

    def shutdown(self) -> None:
        self._shut_down = True
        self.executor.shutdown()

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield batches as lists of indices of texts, the shortest texts first."""
        limits = self.opgraft_config.scheduler
        batch: list[int] = []
        tokens = 0
        # Texts of similar length run together, as some kernels fill shorter ones up.
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            has_most_texts = len(batch) == limits.max_num_seqs
            has_most_tokens = tokens + lengths[index] > limits.max_num_batched_tokens
            if batch and (has_most_texts or has_most_tokens):
                yield batch
                batch = []
                tokens = 0
            batch.append(index)
            tokens += lengths[index]
        if batch:
            yield batch

    def _refusal(self, faults: Mapping[str, str]) -> OpgraftError:
        """Return the error of texts without an embedding.

        Args:
            faults: the fault by the name of each text.

        Returns:
            A ``PluginError`` if a plugin is to blame for a text, a ``ModelError`` if unknown code
            has changed the model, else a ``CheckpointError``.
        """
        model = self.opgraft_config.model
        texts: dict[str, list[str]] = {}
        first: dict[str, str] = {}
        for name, fault in faults.items():
            # The numbers after the colon differ by text. Those of the first text are shown.
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
        known = [fault for kernel, fault in first.items() if kernel != UNEXPLAINED]
        if not known:
            return CheckpointError(message)
        if all(map(blames_no_plugin, known)):
            return ModelError(message)
        return PluginError(message)

    def _unexplained(self, fault: str) -> str:
        """Return the reason of texts for which no kernel is to blame."""
        dtype = self.opgraft_config.model.dtype
        reason = (
            f"its weights are damaged, or {dtype} is too narrow for them. Try the dtype float32."
        )
        _, _, replaced = fault.partition(": ")
        return f"{reason} Besides, {replaced}" if replaced else reason


def _raisable(error: BaseException, name: str) -> Exception:
    """Return the error of a text. An exit or interrupt of a kernel becomes an ``EngineError``."""
    if isinstance(error, Exception):
        return error
    failed = EngineError(f"the batch of {name} failed: {described(error)}")
    failed.__cause__ = error
    return failed


def _listed(names: Sequence[str]) -> str:
    """Name some texts, and count the others."""
    if len(names) <= _NAMED:
        return ", ".join(names)
    shown = ", ".join(names[: _NAMED - 1])
    return f"{shown} and {len(names) - _NAMED + 1} more"
