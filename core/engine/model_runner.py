"""``ModelRunner``: computes the steps of the engine with a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig, ParallelConfig
from opgraft.distributed import get_tensor_model_parallel_world_size
from opgraft.engine.cache_layout import CacheLayout, cache_dtype
from opgraft.engine.compiled_model import CompiledModel, compiled_as_set
from opgraft.engine.expert_balancer import ExpertBalancer
from opgraft.engine.input_batch import InputBatch, Inputs
from opgraft.engine.invariance import make_batch_invariant
from opgraft.engine.largest_step import largest_step
from opgraft.engine.sampling import Sampler, SamplingBatch, TokenLogprobs, prompt_logprobs
from opgraft.engine.sampling.logprobs import ROWS_AT_ONCE
from opgraft.engine.step import NewSequence, Scheduled, Step, StepResult
from opgraft.errors import ConfigError, RequestError
from opgraft.models import TransformersModel, load_model
from opgraft.ops.attention.batch import AttentionBatch, attending
from opgraft.ops.attention.decoder import attention_layers
from opgraft.ops.state_space.layer import state_layers
from torch import Tensor


@PluggableClass.register("model_runner")
class ModelRunner(PluggableClass):
    """Holds the model, its cache and the sequences of the batch, and computes steps.

    Args:
        opgraft_config: resolved.
        device: where the model is.
    """

    def __init__(self, opgraft_config: OpgraftConfig, device: torch.device) -> None:
        self.opgraft_config = opgraft_config
        self.device = device
        self.sampler = Sampler()
        self.sampling = SamplingBatch(opgraft_config.model.seed)
        self.compiled: CompiledModel | None = None
        self._prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = {}

    def load_model(self) -> None:
        """Make the model and read its weights.

        Raises:
            ConfigError: data replicas are to share experts.
        """
        _expect_own_steps(self.opgraft_config.parallel)
        self.model: Any = load_model(self.opgraft_config)
        self.balancer = ExpertBalancer.of(self.model, self.opgraft_config.parallel)
        cache = self.opgraft_config.cache
        if self.opgraft_config.model.batch_invariant:
            make_batch_invariant(self.model, cache.block_size)
        dtype = cache_dtype(cache.dtype, self.model.dtype)
        layers, states = attention_layers(self.model), state_layers(self.model)
        self.layout = CacheLayout.of(layers, cache.block_size, dtype, states)

    def compile_model(self) -> None:
        """Compile the model for ``execute``, if ``compilation_config`` says so. ``encode`` calls it as it is.

        Raises:
            ConfigError: it cannot be compiled, or not here.
        """
        self.compiled = compiled_as_set(self.model, self.layout, self.opgraft_config)
        if self.compiled is not None:
            self.compiled.warm_up(self.device)

    def remark(self, owner: object) -> str:
        return f"the model is compiled by {self.compiled.backend}" if self.compiled else ""

    def allocate_cache(self, num_blocks: int, num_states: int = 0) -> None:
        """Make the cache, and slots for states; sequences that were known are forgotten."""
        self.caches = self.layout.allocate(num_blocks, self.device)
        self.states = self.layout.allocate_states(num_states, self.device)
        self.batch = InputBatch(
            [{name: self.caches[name] for name in group} for group in self.layout.groups],
            self.opgraft_config.scheduler.max_num_seqs,
            self.opgraft_config.scheduler.max_num_batched_tokens,
            -(-self.model.max_position // self.layout.block_size),
            self.layout.block_size,
            self.device,
            fits_context=bool(self.model.fitted_ropes),
            states=self.layout.states_of_layers(self.states),
        )

    @torch.inference_mode()
    def encode(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute the hidden states ``[tokens, hidden_size]`` of each of some sequences, without a cache."""
        if isinstance(self.model, TransformersModel) and self.model.examination.uncached and len(sequences) > 1:
            return [states for each in sequences for states in self.encode([each])]  # its layers know of no batch
        lengths = [len(each) for each in sequences]
        ids = torch.tensor(list(chain.from_iterable(sequences)), device=self.device)
        positions = torch.tensor(list(chain.from_iterable(map(range, lengths))), device=self.device)
        if len(sequences) == 1:
            return [self.model(ids, positions)]
        with attending(AttentionBatch.of_sequences(lengths, device=self.device)):
            return list(self.model(ids, positions).split(lengths))

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Compute a step: change what is known of the sequences, run the model, sample.

        If it raises, each sequence of the step is to be removed by the next one.
        """
        started = perf_counter()
        errors = self._apply(step)
        sequences = [each for each in step.sequences if each.request_id not in errors] if errors else step.sequences
        if not sequences:
            return StepResult({}, errors=errors, refused=errors.keys())
        inputs = self.batch.inputs(sequences, continues=not step.added)
        prepared = perf_counter()
        with attending(inputs.batch):
            hidden = (self.compiled or self.model)(inputs.input_ids, inputs.positions)
        if self._prompt_logprobs:
            self._take_prompt_logprobs(hidden, sequences)
        logits = self._logits(hidden, inputs) if inputs.sampled else None
        computed = perf_counter()
        result = StepResult({}) if logits is None else self._sample(logits, inputs)
        seconds = {"inputs": prepared - started, "model": computed - prepared, "sample": perf_counter() - computed}
        if self.balancer is not None:
            self.balancer.after_step()
        errors, refused = {**errors, **result.errors}, errors.keys() | result.refused
        return dataclasses.replace(result, errors=errors, refused=refused, seconds=seconds)

    def peak_of_largest_step(self, free: Callable[[], int]) -> int:
        """Return the bytes by which the free memory shrinks at most while the largest step is computed.

        Args:
            free: tells the bytes that are free; asked after every layer.
        """
        limits = self.opgraft_config.scheduler
        kinds, longest = len(self.layout.groups), self.model.max_position
        sizes = limits.max_num_seqs, limits.max_num_batched_tokens, longest, self.layout.block_size, kinds
        step = largest_step(*sizes)
        self.allocate_cache(sum(len(blocks) for new in step.added for blocks in new.blocks), len(step.added))
        seen = [free()]
        hooks = [each.register_forward_hook(lambda *_: seen.append(free())) for each in self.model.modules()]
        try:
            self.execute(step)
            seen.append(free())
        finally:
            for hook in hooks:
                hook.remove()
            self.execute(Step(tuple(new.request_id for new in step.added), (), (), ()))
            del self.caches, self.states, self.batch
        return seen[0] - min(seen)

    def _apply(self, step: Step) -> dict[str, str]:
        """Change what is known of the sequences, and return why some of those that are added fail."""
        for request_id in step.removed:  # before anything that may raise
            self._forget(request_id)
        errors: dict[str, str] = {}
        for new in step.added:
            try:
                self._add(new)
            except RequestError as error:
                errors[new.request_id] = str(error)
        self.batch.apply(step)
        if step.copies:
            sources, targets = torch.tensor(step.copies, device=self.device).unbind(1)
            for cache in {id(cache): cache for cache in self.caches.values()}.values():
                cache[targets] = cache[sources]
        self._move_states(step)
        return errors

    def _move_states(self, step: Step) -> None:
        """Copy and zero states one after another, as a slot may have been given away behind a copy of it."""
        for source, target in step.states:
            for slots in self.states.values():
                if source is None:
                    slots[target] = 0
                else:
                    slots[target] = slots[source]

    def _add(self, new: NewSequence) -> None:
        self.sampling.add(
            new.request_id,
            new.params,
            new.tokens[: new.prompt_length],
            new.tokens[new.prompt_length :],
            arrival=new.arrival,
            eos=new.eos,
            bad_words=new.bad_words,
            grammar=new.grammar,
        )
        if new.params.prompt_logprobs is not None and len(new.tokens) == new.prompt_length:
            self._prompt_logprobs[new.request_id] = (new.params.prompt_logprobs, [])

    def _forget(self, request_id: str) -> None:
        """Forget a sequence wherever it is known; a step that failed may have added it to some places only."""
        if request_id in self.sampling:
            self.sampling.remove(request_id)
        if request_id in self.batch:
            self.batch.remove(request_id)
        self._prompt_logprobs.pop(request_id, None)

    def _logits(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        if len(inputs.sampled) < len(hidden):
            hidden = hidden[inputs.sampled_rows]
        logits: Tensor = self.model.compute_logits(hidden)
        return logits

    def _sample(self, logits: Tensor, inputs: Inputs) -> StepResult:
        self.sampling.select(inputs.sampled)
        sampled = self.sampler(logits, self.sampling)
        errors = {str(request_id): error for request_id, error in sampled.errors.items()}
        refused = {str(request_id) for request_id in sampled.refused}
        tokens = {}
        for request_id, token in zip(inputs.sampled, sampled.tokens.tolist(), strict=True):
            if request_id in errors:
                continue
            try:
                self.sampling.append(request_id, token)
            except RequestError as error:
                errors[request_id] = str(error)
                refused.add(request_id)
            else:
                self.batch.append(request_id, token)
                tokens[request_id] = token
        ended = [name for name in inputs.sampled if name in self._prompt_logprobs]
        prompts = {name: self._prompt_logprobs.pop(name)[1] for name in ended}
        return StepResult(tokens, sampled.logprobs, errors, prompts, refused=refused)

    def _take_prompt_logprobs(self, hidden: Tensor, sequences: Sequence[Scheduled]) -> None:
        """Compute the log-probabilities of a chunk of a prompt for who asks for them, a few rows at a time."""
        first = 0
        for each in sequences:
            found = self._prompt_logprobs.get(each.request_id)
            if found is not None:
                count, known = found
                prompt = self.batch.tokens(each.request_id)
                for done in range(0, each.count, ROWS_AT_ONCE):
                    rows = slice(first + done, first + min(done + ROWS_AT_ONCE, each.count))
                    known += prompt_logprobs(self.model.compute_logits(hidden[rows]), prompt, each.start + done, count)
            first += each.count


def _expect_own_steps(parallel: ParallelConfig) -> None:
    """Raise ``ConfigError`` where steps need those of other data replicas, which step when they have work."""
    ranks = get_tensor_model_parallel_world_size()
    if parallel.expert > ranks:
        raise ConfigError(
            f"parallel.expert is {parallel.expert}, and the engine's tensor group has {ranks} "
            f"rank{'s' * (ranks > 1)}: an engine steps when it has work, and would wait for data replicas that have "
            f"none. Set parallel.expert to 1{f' or {ranks}' * (ranks > 1)}, or run the model in a loop of your own, in "
            "which all replicas make the same steps"
        )
