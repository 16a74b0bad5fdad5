"""``ModelRunner``: computes the steps of the engine with a model.

``ModelRunner.execute`` computes one step:

1. ``_apply`` removes and adds sequences, appends tokens and blocks to known ones, and copies
   blocks.
2. ``_compute`` makes tensors of the step (``InputBatch.inputs``), calls the model, and takes the
   logits of the last token of each sequence, and of drafted tokens.
3. ``_sample`` draws a token from each row of logits (``Sampler``). ``_append_sampled`` appends the
   tokens to the sequences of the sampler, and makes a ``StepResult``. With drafts,
   ``_sample_after_drafts`` does so once for each accepted place.
"""

# Three copies of a sequence receive a sampled token, one after another: ``SamplingBatch`` in the
# step that samples the token, ``Request.output`` in ``Scheduler.update``, and ``InputBatch`` in the
# step that computes the token.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from time import perf_counter
from typing import Any, ClassVar, cast

import torch
from opgraft.base.text import described
from opgraft.binding.blame import UNEXPLAINED, culprit_of, misshapen_by, replaced_among, verdicts_on
from opgraft.binding.pluggable_class import PluggableClass, choose_class
from opgraft.binding.provenance import is_out_of_memory
from opgraft.config import OpgraftConfig, ParallelConfig
from opgraft.distributed import get_dp_group, get_tensor_model_parallel_world_size, get_tp_group
from opgraft.engine.lora.adapters import Adapters
from opgraft.engine.lora.request import NO_LORA
from opgraft.engine.runner.cache_layout import CacheLayout, cache_dtype
from opgraft.engine.runner.changed_weights import changed_weight
from opgraft.engine.runner.compiled_model import CompiledModel, compiled_as_set
from opgraft.engine.runner.expert_balancer import ExpertBalancer
from opgraft.engine.runner.input_batch import Draft, InputBatch, Inputs
from opgraft.engine.runner.invariance import make_batch_invariant
from opgraft.engine.runner.largest_step import largest_step, logits_bound, step_bound
from opgraft.engine.runner.op_times import OpTimes, with_rest
from opgraft.engine.runner.recorded_steps import (
    RecordedSteps,
    blocks_of_padding,
    numbers_of_sequences,
    records_steps,
    without_recording,
)
from opgraft.engine.runner.replay import blocks_of, steps_again
from opgraft.engine.sampling import (
    SampledTokens,
    Sampler,
    SamplingBatch,
    TokenLogprobs,
    prompt_logprobs,
)
from opgraft.engine.sampling.logprobs import ROWS_AT_ONCE
from opgraft.engine.sampling.replaced import sampled_by
from opgraft.engine.sampling.sampler import NO_NUMBERS
from opgraft.engine.step import NewSequence, ScheduledPart, Step, StepResult
from opgraft.engine.workers.stage_link import StageLink
from opgraft.errors import ConfigError, PluginError, RequestError
from opgraft.machine.memory import bytes_in_files
from opgraft.models import TransformersModel, load_model
from opgraft.models.encoder import sequence_attention
from opgraft.models.mapped import addresses_of, leave_files
from opgraft.models.model import HasLabels
from opgraft.ops.attention.batch import AttentionBatch, attending
from opgraft.ops.attention.decoder import attention_layers
from opgraft.ops.state_space.layer import state_layers
from opgraft.registry.op_classes import definer
from torch import Tensor, nn

_SECONDS_IN_FILES = 1.0
"""Seconds after loading, until weights move from files to memory."""


@PluggableClass.register("model_runner")
class ModelRunner(PluggableClass):
    """Holds the model, its cache and the sequences of the batch, and computes steps.

    Args:
        opgraft_config: all settings; what it leaves open has the built-in default.
        device: where the model is.
    """

    samples_on_first_rank: ClassVar[bool] = True
    """True if only the first of the workers that share layers has logits, and samples.

    The other workers receive the tokens with the next step.
    """
    stores_blocks: ClassVar[bool] = True
    """True if ``_compute`` and ``allocate_cache`` of the same class keep all blocks in ``caches``.

    A subclass with its own of these has no store of blocks, unless the subclass says so, too.
    """
    takes_adapters: ClassVar[bool] = True
    """True if ``_compute`` of the same class calls the layers of the model within ``_adapting``.

    A subclass with a ``_compute`` of its own takes none, unless the subclass says so, too.
    """

    bytes_in_files: int = 0
    """Bytes of loaded weights in mapped files, before the move to memory."""

    def __init__(self, opgraft_config: OpgraftConfig, device: torch.device) -> None:
        self.opgraft_config = opgraft_config.resolved()
        self.device = device
        self.sampler = Sampler(self.opgraft_config)
        self.sampling = SamplingBatch(self.opgraft_config.model.seed)
        self.compiled: CompiledModel | None = None
        self.recorded: RecordedSteps | None = None
        self.link: StageLink | None = None
        self.adapters: Adapters | None = None
        self._op_times = OpTimes(self.opgraft_config.server.time_ops_every or 0, device)
        self._prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = {}

    def load_model(self) -> None:
        """Make the model and read its weights.

        Raises:
            ConfigError: data replicas share experts, but do not step together; tokens are to be
                drafted, and layers keep states; or adapters cannot be applied.
        """
        _expect_own_steps(self.opgraft_config.parallel)
        if self.opgraft_config.lora.enabled:
            self._expect_adaptable()
        self.model: Any = load_model(self.opgraft_config)
        # Behind the first answers: small pages are read more slowly, and the files may change.
        self.bytes_in_files = bytes_in_files(addresses_of(self.model))
        leave_files(self.model, wait=_SECONDS_IN_FILES)
        self.balancer = ExpertBalancer.of(self.model, self.opgraft_config.parallel)
        cache = self.opgraft_config.cache
        if self.opgraft_config.model.batch_invariant:
            make_batch_invariant(self.model, cache.block_size)
        dtype = cache_dtype(cache.dtype, self.model.dtype)
        layers = attention_layers(self.model)
        states = state_layers(self.model)
        self.layout = CacheLayout.of(layers, cache.block_size, dtype, states)
        if states and self.opgraft_config.speculation.method is not None:
            raise ConfigError(
                "speculation.method is set, and the model has layers that keep a state of each "
                "sequence, which cannot go back behind a token that was not accepted: leave it out"
            )
        self.link = StageLink.of(self.model, self.device)
        if self.opgraft_config.lora.enabled:
            self.adapters = Adapters(self.model, self.opgraft_config, self.device)

    def _expect_adaptable(self) -> None:
        """Refuse settings and runners with which adapters cannot be applied.

        Raises:
            ConfigError: there is such a setting.
        """
        if self.opgraft_config.model.batch_invariant:
            raise ConfigError(
                "lora.enabled and model.batch_invariant are set, and adapters are not computed "
                "alike in every batch: turn one of them off"
            )
        computing = definer(type(self), "_compute")
        has_told = definer(type(self), "takes_adapters", above=computing) is not None
        is_own = computing is not None and "takes_adapters" in vars(computing)
        if not self.takes_adapters or not (has_told or is_own):
            raise ConfigError(
                f"lora.enabled is set, and {type(self).__name__} computes steps without adapters: "
                "turn it off, or let the class apply them and set takes_adapters"
            )

    def compile_model(self) -> None:
        """Compile the model for ``execute``, if ``compilation_config`` asks for this.

        Raises:
            ConfigError: the model cannot be compiled, or not on this machine.
        """
        layout = self.layout
        config = self.opgraft_config
        is_recorded = records_steps(config)
        if is_recorded:
            config = without_recording(config)
        self.compiled = compiled_as_set(self.model, layout.layers, layout.states, config)
        if self.compiled is None:
            return
        if self.link is None:
            self.compiled.warm_up(self.device)
        else:
            self.compiled.warm_up(self.device, self.link.empty)
        if is_recorded:
            self.recorded = self._recorded_steps(self.compiled)

    def _recorded_steps(self, model: CompiledModel) -> RecordedSteps:
        """Record steps with one token of each sequence.

        Raises:
            ConfigError: the model cannot be recorded.
        """
        groups = [{name: self.caches[name] for name in group} for group in self.layout.groups]
        block_size = self.layout.block_size
        return RecordedSteps(
            model,
            groups,
            numbers_of_sequences(self.opgraft_config),
            self.model.max_position,
            block_size,
            self.num_blocks,
            self.device,
        )

    def prepare_encoder(self) -> None:
        """Prepare the model for ``encode``: try two texts, and compile if settings ask for this.

        Raises:
            ConfigError: the model cannot be compiled, or not on this machine.
        """
        if isinstance(self.model, TransformersModel):
            self.model.try_texts(self.device)
        layers = sequence_attention(self.model)
        if layers:
            self.compiled = compiled_as_set(self.model, layers, (), self.opgraft_config)
        if self.compiled is None:
            return
        if isinstance(self.model, HasLabels):
            self.compiled.warm_up(self.device, lambda size: [self._token_types([size], [size])])
        else:
            self.compiled.warm_up(self.device)

    def remark(self, owner: object) -> str:
        """Return a remark on the model for ``explain``; empty without compilation."""
        return f"the model is compiled by {self.compiled.backend}" if self.compiled else ""

    def allocate_cache(self, num_blocks: int, num_states: int = 0) -> None:
        """Make the cache and the slots for states, and forget all sequences."""
        self.recorded = None
        self.num_blocks = num_blocks
        padding = blocks_of_padding(self.opgraft_config)
        self.caches = self.layout.allocate(num_blocks + padding, self.device)
        self.states = self.layout.allocate_states(num_states, self.device)
        self.batch = self._input_batch(self.device, self.caches, self.states)

    def cache_groups(self) -> list[Mapping[str, Tensor]]:
        """Return the caches of each group of layers, by the names of the layers.

        Raises:
            ConfigError: blocks cannot be stored, as the model keeps states beside them, or the
                runner computes by programs of its own.
        """
        setting = self.opgraft_config.handover.store_setting
        if self.layout.states:
            raise ConfigError(
                f"{setting} is set, and the model has layers that keep a state of each sequence, "
                "which is in no block: leave it out"
            )
        own = {definer(type(self), name) for name in ("_compute", "allocate_cache")}
        if not self.stores_blocks or not all("stores_blocks" in vars(cls) for cls in own if cls):
            raise ConfigError(
                f"{setting} is set, and {type(self).__name__} may keep blocks where only its own "
                "code reaches them: leave it out, or set stores_blocks in the class that computes "
                "steps and allocates the cache"
            )
        blocks = self.num_blocks + blocks_of_padding(self.opgraft_config)
        if any(len(cache) != blocks for cache in self.caches.values()):
            raise ConfigError(
                f"{setting} is set, and the first dimension of a layer's cache is not that of the "
                "blocks, as its kv_cache_shape tells: leave it out"
            )
        return [{name: self.caches[name] for name in group} for group in self.layout.groups]

    def _input_batch(
        self,
        device: torch.device,
        caches: Mapping[str, Tensor],
        states: Mapping[torch.dtype, Tensor],
    ) -> InputBatch:
        limits = self.opgraft_config.scheduler
        block_size = self.layout.block_size
        return InputBatch(
            [{name: caches[name] for name in group} for group in self.layout.groups],
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            -(-self.model.max_position // block_size),
            block_size,
            device,
            has_context_ropes=bool(self.model.fitted_ropes),
            states=self.layout.states_of_layers(states),
        )

    @property
    def _packs_texts(self) -> bool:
        """True if one call of the model may have several whole texts."""
        return not isinstance(self.model, TransformersModel) or self.model.packs

    @torch.inference_mode()
    def encode(
        self, sequences: Sequence[Sequence[int]], seconds: Sequence[int] = ()
    ) -> list[Tensor]:
        """Return the hidden states ``[tokens, hidden_size]`` of each sequence, without a cache.

        Args:
            sequences: token ids of each.
            seconds: of each sequence that is a pair of texts, the place of the second text.
        """
        try:
            return self._encoded(self.compiled or self.model, sequences, seconds)
        except Exception as error:
            blamed = self._blamed_for(
                error, lambda: [self._encoded(self.model, sequences, seconds)]
            )
            if blamed is not None:
                raise blamed from error
            raise

    def _encoded(
        self, model: Any, sequences: Sequence[Sequence[int]], seconds: Sequence[int] = ()
    ) -> list[Tensor]:
        """Call a model on whole sequences, as one packed batch if the model can."""
        if len(sequences) > 1 and not self._packs_texts:
            return [states for each in sequences for states in self._encoded(model, [each])]
        lengths = [len(each) for each in sequences]
        tokens = list(chain.from_iterable(sequences))
        places = list(chain.from_iterable(map(range, lengths)))
        ids = torch.tensor(tokens, device=self.device)
        positions = torch.tensor(places, device=self.device)
        others: tuple[Tensor, ...] = ()
        if isinstance(self.model, HasLabels):
            others = (self._token_types(lengths, seconds or lengths),)
        if len(sequences) == 1:
            return [model(ids, positions, *others)]
        with attending(AttentionBatch.of_sequences(lengths, device=self.device)):
            return list(model(ids, positions, *others).split(lengths))

    def _token_types(self, lengths: Sequence[int], seconds: Sequence[int]) -> Tensor:
        """Return the type of each token: 1 in the second text of a pair, else 0."""
        types: list[int] = []
        for length, second in zip(lengths, seconds, strict=True):
            types += [0] * second + [1] * (length - second)
        return torch.tensor(types, device=self.device)

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Compute a step: apply the changes to sequences, run the model, sample.

        After an error, the next step must remove each sequence of this one.
        """
        if self.link is not None:
            self.link.begin(sum(each.count for each in step.sequences))
        try:
            return self._result(step)
        except Exception as error:
            # The other stages of a pipeline wait for this one.
            if self.link is not None and step.sequences:
                self.link.fail(error)
            request_ids = [each.request_id for each in step.sequences]

            def passes() -> Iterator[Any]:
                return self._compute_again(request_ids)

            blamed = self._blamed_for(error, passes)
            if blamed is not None:
                raise blamed from error
            raise

    def _blamed_for(
        self, error: Exception, passes: Callable[[], Iterable[Any]]
    ) -> PluginError | None:
        """Return the error about a kernel with a wrong result, if one made the model fail.

        Args:
            error: of the model.
            passes: calls the model again, and yields the results.
        """
        if is_out_of_memory(error) or not self._computes_alone:
            return None
        return misshapen_by(error, self._modules, passes)

    def _result(self, step: Step) -> StepResult:
        started = perf_counter()
        errors = self._apply(step)
        sequences: Sequence[ScheduledPart] = step.sequences
        if not sequences:
            # Other replicas compute a step now, and their tokens need the experts of this one.
            if self.opgraft_config.parallel.in_rounds:
                self._run_without_tokens(started)
            return StepResult({})
        # Failed sequences are computed, because other stages compute them, but not sampled.
        if errors:
            sequences = [
                each._replace(samples=each.samples and each.request_id not in errors)
                for each in sequences
            ]
        try:
            result = self._compute(sequences, started, continues=not step.added)
        finally:
            # Sampling may fail on one rank alone, and all ranks must count the same steps.
            if self.balancer is not None:
                self.balancer.after_step(started)
        if not errors:
            return result
        all_errors = {**errors, **result.errors}
        return dataclasses.replace(
            result, errors=all_errors, refused=errors.keys() | result.refused
        )

    def _run_without_tokens(self, started: float) -> None:
        """Run the model on no tokens: only the experts compute tokens, those of other replicas."""
        none = torch.zeros(0, dtype=torch.long, device=self.device)
        self.model(none, none)
        if self.balancer is not None:
            self.balancer.after_step(started)

    def _compute(
        self, sequences: Sequence[ScheduledPart], started: float, *, continues: bool
    ) -> StepResult:
        """Run the model on the sequences of a step, and sample on the last stage of a pipeline.

        A subclass may do this in another way.

        Args:
            sequences: all known to ``self.batch`` and, on the last stage, to ``self.sampling``.
            started: begin of the step, for ``StepResult.seconds``.
            continues: as of ``AttentionBatch``.
        """
        has_adapters = self.adapters is not None and any(
            self.batch.lora(each.request_id) for each in sequences
        )
        if has_adapters:
            sequences = self._by_slot(sequences)
        inputs = self.batch.inputs(sequences, continues=continues)
        prepared = perf_counter()
        received = self.link.receive() if self.link is not None else None
        arrived = perf_counter()
        # The first stage of a pipeline reads token ids, later ones also hidden states.
        further = () if received is None else (received,)
        with self._op_times.of_step(is_eager=self.compiled is None) as op_seconds:
            with self._adapting(self.batch, [(each.request_id, each.count) for each in sequences]):
                hidden = self._hidden(inputs, further, has_adapters=has_adapters)
            if self.link is not None:
                self.link.pass_on(hidden)
            logits = self._logits_of(hidden, inputs, sequences) if self._is_last_stage else None
        computed = perf_counter()
        if logits is not None and inputs.drafts:
            result = self._sample_after_drafts(logits, inputs)
        else:
            result = self._sample(logits, inputs.sampling)
        seconds = {
            "inputs": prepared - started,
            "model": computed - arrived,
            "sample": perf_counter() - computed,
        }
        told = with_rest(op_seconds, computed - arrived)
        return dataclasses.replace(result, seconds=seconds, op_seconds=told)

    def _hidden(self, inputs: Inputs, further: tuple[Tensor, ...], *, has_adapters: bool) -> Tensor:
        """Return the results of the model for a step, from a static graph if the step has one."""
        if has_adapters:
            # Compiled code and recorded steps have the layers without adapters.
            model = self.model
        else:
            recorded = None if self.recorded is None else self.recorded(inputs)
            if recorded is not None:
                return recorded
            model = self.compiled or self.model
        with attending(inputs.batch):
            hidden: Tensor = model(inputs.input_ids, inputs.positions, *further)
        return hidden

    def _by_slot(self, sequences: Sequence[ScheduledPart]) -> Sequence[ScheduledPart]:
        """Return the sequences of a step, those without an adapter first, then by adapter."""
        numbers = [self.batch.lora(each.request_id) for each in sequences]
        if self.adapters is not None:
            self.adapters.give_slots(numbers)
        return [sequences[place] for place in self._order_by_slot(numbers)]

    def _order_by_slot(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the places of adapters in the order of their slots."""
        slots = [0] * len(numbers) if self.adapters is None else self.adapters.slots_of(numbers)
        return sorted(range(len(slots)), key=slots.__getitem__)

    def _adapting(
        self, batch: InputBatch, rows: Sequence[tuple[str, int]]
    ) -> AbstractContextManager[None]:
        """Return a context for a call of the model or its head, in which rows have adapters.

        Args:
            batch: knows the adapters of sequences.
            rows: sequences in the order of ``_by_slot``, each with the number of its rows.
        """
        numbers = [batch.lora(request_id) for request_id, _ in rows]
        if self.adapters is None or not any(numbers):
            return nullcontext()
        return self.adapters.applied(numbers, [count for _, count in rows])

    @property
    def _modules(self) -> nn.Module:
        """The model, and beside it the ops of adapters."""
        if self.adapters is None:
            return cast(nn.Module, self.model)
        return nn.ModuleList([self.model, *self.adapters.ops.values()])

    def _logits_of(
        self, hidden: Tensor, inputs: Inputs, sequences: Sequence[ScheduledPart]
    ) -> Tensor | None:
        if self._prompt_logprobs:
            self._compute_prompt_logprobs(hidden, sequences)
        return self._logits(hidden, inputs) if inputs.sampling else None

    def bound_of_largest_step(self) -> int | None:
        """Return a bound on the bytes of the largest step; ``None`` for unknown layers.

        Layers of the model families in this package are known, except layers with states.
        """
        if isinstance(self.model, TransformersModel) or self.layout.states:
            return None
        limits = self.opgraft_config.scheduler
        bound = step_bound(
            self.model,
            limits.max_num_batched_tokens,
            max(limits.max_num_seqs, ROWS_AT_ONCE),
            self.model.max_position,
            limits.max_num_seqs,
        )
        if bound is None:
            return None
        return bound + self._bytes_of_drafts() + self._bytes_of_adapters

    @property
    def _bytes_of_adapters(self) -> int:
        """The bytes that adapters may take later. The cache must leave them free."""
        return 0 if self.adapters is None else self.adapters.most_bytes()

    def _bytes_of_drafts(self) -> int:
        """Return the most bytes of the logits of drafted tokens.

        They are there at once, and the sampler takes one for each sequence at a time.
        """
        speculation = self.opgraft_config.speculation
        if speculation.method is None:
            return 0
        limits = self.opgraft_config.scheduler
        rows = min(limits.max_num_seqs * speculation.max_tokens, limits.max_num_batched_tokens)
        return logits_bound(rows, self.vocab_size or 0)

    @property
    def vocab_size(self) -> int | None:
        """The number of tokens of the vocabulary; ``None`` if the model has no config."""
        config = self.model.config
        return None if config is None else int(config.get_text_config().vocab_size)

    def calls_of_largest_step(self) -> int:
        """Return the approximate number of calls of modules in the largest step."""
        limits = self.opgraft_config.scheduler
        logits = limits.max_num_seqs + limits.max_num_batched_tokens // ROWS_AT_ONCE
        return sum(1 for _ in self.model.modules()) + logits

    def peak_of_largest_step(
        self, free: Callable[[], int], called: Callable[[], object] = lambda: None
    ) -> int:
        """Compute the largest step, and return the bytes of memory that it takes at most.

        Args:
            free: returns the free bytes; called after every call of a module.
            called: called after every call of a module, to show progress.
        """
        limits = self.opgraft_config.scheduler
        step = largest_step(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            self.model.max_position,
            self.layout.block_size,
            len(self.layout.groups),
        )
        num_blocks = sum(len(blocks) for new in step.added for blocks in new.blocks)
        self.allocate_cache(num_blocks, len(step.added))
        seen = [free()]

        def look(*_: object) -> None:
            seen.append(free())
            called()

        hooks = [each.register_forward_hook(look) for each in self.model.modules()]
        try:
            self.execute(step)
            seen.append(free())
        finally:
            for hook in hooks:
                hook.remove()
            removed = tuple(new.request_id for new in step.added)
            self.execute(Step(removed, (), (), ()))
            del self.caches, self.states, self.batch
        return seen[0] - min(seen) + self._bytes_of_drafts() + self._bytes_of_adapters

    def _apply(self, step: Step) -> dict[str, str]:
        """Apply the changes of a step to the sequences, and return the errors of added ones."""
        # Before anything that may raise: a removed sequence must not stay.
        for request_id in step.removed:
            self._forget(request_id)
        errors: dict[str, str] = {}
        if self._is_last_stage:
            for new in step.added:
                try:
                    self._add(new)
                except RequestError as error:
                    errors[new.request_id] = str(error)
        self.batch.apply(step)
        if step.copies:
            self._copy_blocks(step.copies)
        self._move_states(step)
        return errors

    @property
    def _is_last_stage(self) -> bool:
        """True on the last stage of a pipeline, and without a pipeline."""
        return self.link is None or self.link.group.is_last_rank

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = torch.tensor(copies, device=self.device).unbind(1)
        # Layers of several groups share a tensor.
        tensors = {id(cache): cache for cache in self.caches.values()}
        for cache in tensors.values():
            cache[targets] = cache[sources]

    def _move_states(self, step: Step) -> None:
        """Copy and zero states in order: a slot may be copied first, and overwritten later."""
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
        """Forget a sequence. After a failed step, only some of the parts may know the sequence."""
        if request_id in self.sampling:
            self.sampling.remove(request_id)
        if request_id in self.batch:
            self.batch.remove(request_id)
        self._prompt_logprobs.pop(request_id, None)

    def _logits(self, hidden: Tensor, inputs: Inputs) -> Tensor | None:
        # Rows of drafted tokens come last, so the order is another one.
        if inputs.drafts or len(inputs.sampling) < len(hidden):
            hidden = hidden[inputs.sampled_rows]
        number = len(inputs.sampling)
        logits = self._logits_of_rows(hidden[:number], [(name, 1) for name in inputs.sampling])
        if not inputs.drafts:
            return logits
        drafted = [(name, len(draft.tokens)) for name, draft in inputs.drafts.items()]
        # All ranks take part in both calls, and perhaps the first alone has logits.
        of_drafts = self._logits_of_rows(hidden[number:], drafted)
        if logits is None or of_drafts is None:
            return None
        return torch.cat([logits, of_drafts])

    def _logits_of_rows(self, hidden: Tensor, rows: Sequence[tuple[str, int]]) -> Tensor | None:
        """Return logits. The arguments of ``rows`` are as of ``_adapting``."""
        with self._adapting(self.batch, rows):
            logits: Tensor | None = self.model.compute_logits(hidden)
        return logits

    def _sample(self, logits: Tensor | None, request_ids: tuple[str, ...]) -> StepResult:
        """Sample a token for each row of logits."""
        # Of the ranks that share layers, perhaps the first alone has logits.
        if logits is None:
            self._pop_ended_prompts(request_ids)
            return StepResult({})
        self.sampling.select(request_ids)
        sampled = sampled_by(self.sampler, logits, self.sampling)
        return self._append_sampled(sampled, request_ids)

    def _sample_after_drafts(self, logits: Tensor, inputs: Inputs) -> StepResult:
        """Sample a token for each sequence, and one more after each accepted token of its draft.

        A drafted token is accepted if the sampler has chosen just this token. Each row is sampled
        like the only row of a step of its own, so drafts change no token.
        """
        drafts = inputs.drafts
        number = len(inputs.sampling)
        rows_of_drafts = logits[number:]
        first = self._sample(logits[:number], inputs.sampling)
        further: dict[str, list[tuple[int, Any]]] = {request_id: [] for request_id in drafts}
        newest = first.tokens
        place = 0
        while accepting := self._accepting(drafts, newest, place):
            rows = [drafts[request_id].row + place for request_id in accepting]
            # A row that fails is left out. It fails again as the first row of the next step.
            found = self._sample(rows_of_drafts[rows], accepting)
            newest = found.tokens
            for request_id, token in newest.items():
                further[request_id].append((token, found.logprobs.get(request_id)))
            place += 1
        return dataclasses.replace(first, further=further)

    def _accepting(
        self, drafts: Mapping[str, Draft], newest: Mapping[str, int], place: int
    ) -> tuple[str, ...]:
        """Return the unfinished requests whose newest token equals the drafted one at a place."""
        accepting = []
        for request_id, token in newest.items():
            draft = drafts[request_id].tokens if request_id in drafts else ()
            is_drafted = draft[place : place + 1] == (token,)
            if is_drafted and not self.sampling.ends(request_id, token):
                accepting.append(request_id)
        return tuple(accepting)

    def _append_sampled(self, sampled: SampledTokens, request_ids: tuple[str, ...]) -> StepResult:
        """Append tokens to the sequences of the sampler, and return the result of the step."""
        tokens = dict(zip(request_ids, sampled.tokens.tolist(), strict=True))
        errors = {str(request_id): error for request_id, error in sampled.errors.items()}
        errors |= self._blamed(errors, request_ids)
        for request_id in errors:
            del tokens[request_id]
        refusals = self.sampling.extend(tokens.items())
        # Tokens that the grammar of a request does not allow.
        astray = {str(request_id): error for request_id, error in refusals.items()}
        for request_id in astray:
            del tokens[request_id]
        refused = {str(request_id) for request_id in sampled.refused} | astray.keys()
        logprobs = {str(request_id): found for request_id, found in sampled.logprobs.items()}
        return StepResult(
            tokens, logprobs, errors | astray, self._pop_ended_prompts(request_ids), refused=refused
        )

    def _blamed(self, errors: Mapping[str, str], request_ids: Sequence[str]) -> dict[str, str]:
        """Return the errors of requests with NaN or infinite logits, with the kernel to blame.

        Args:
            errors: messages of the sampler, by request.
            request_ids: of all requests of the same step.
        """
        wrong = [request_id for request_id, error in errors.items() if NO_NUMBERS in error]
        if not wrong:
            return {}
        verdicts = [UNEXPLAINED] * len(wrong)
        if self._computes_alone:
            verdicts = verdicts_on(
                lambda index: self._wrong_kernel_of(wrong[index], request_ids), len(wrong)
            )
        replaced = self.replaced_class()
        unexplained = f"{NO_NUMBERS}. Besides, {replaced}" if replaced else NO_NUMBERS
        if UNEXPLAINED in verdicts:
            unexplained = self._changed_weight or unexplained
        blamed = {}
        for request_id, verdict in zip(wrong, verdicts, strict=True):
            reason = unexplained if verdict == UNEXPLAINED else verdict
            blamed[request_id] = errors[request_id].replace(NO_NUMBERS, reason)
        return blamed

    def _wrong_kernel_of(self, request_id: str, request_ids: Sequence[str]) -> str:
        """Compute a request again, alone and beside the others, and name the first wrong kernel."""
        found = culprit_of(self._modules, lambda: self._compute_again([request_id]))
        if not found and len(request_ids) > 1:
            found = culprit_of(self._modules, lambda: self._compute_again(request_ids))
        # Without a cache, if the memory had no room for another cache.
        uncached = found or culprit_of(self._modules, lambda: self._compute_uncached(request_id))
        return uncached or UNEXPLAINED

    @functools.cached_property
    def _changed_weight(self) -> str:
        """Return the answer of ``changed_weight``, which reads files, once."""
        name = self.opgraft_config.model.name
        return changed_weight(self.model, name) if name else ""

    def replaced_class(self) -> str:
        """Name a plugin's class that replaces a part of the engine or the model; else empty."""
        return replaced_among((self, self.sampler, *self._modules.modules()))

    @property
    def _computes_alone(self) -> bool:
        """True if no other process takes part in a call of the model."""
        parallel = self.opgraft_config.parallel
        ranks = get_tensor_model_parallel_world_size()
        return ranks == 1 and self.link is None and not parallel.in_rounds

    @torch.inference_mode()
    def wrong_kernel(self, sequences: Sequence[Sequence[int]]) -> str:
        """Encode sequences once more, and return the answer of ``culprit_of``.

        If no kernel is to blame, return the answer of ``changed_weight``, if there is one. All
        ranks of the model call this together.

        Args:
            sequences: token ids of each.
        """
        verdict = culprit_of(
            self.model,
            lambda: [self._encoded(self.model, sequences)],
            may_repeat=self._computes_alone,
        )
        changed = self._changed_weight if verdict == UNEXPLAINED else ""
        return changed or verdict

    def _compute_again(self, request_ids: Sequence[str]) -> Iterator[Any]:
        """Compute sequences of the batch as ``_computed_apart`` does."""
        numbers = list(map(self.batch.lora, request_ids))
        order = self._order_by_slot(numbers)
        sequences = [self.batch.tokens(request_ids[place]) for place in order]
        return self._computed_apart(sequences, [numbers[place] for place in order])

    @torch.inference_mode()
    def try_adapter(self, number: int) -> str:
        """Compute a few tokens with an adapter, and return the error; empty without one.

        In a step, the error would be one of all requests. If other processes take part in a call of
        the model, nothing is computed.
        """
        if self.adapters is None or not self._computes_alone:
            return ""
        try:
            self.adapters.give_slots([number])
            # A row without an adapter comes first.
            for _ in self._computed_apart([[0], [0, 0]], [NO_LORA, number]):
                pass
        except Exception as error:
            # The cache has the memory that this would take. A step needs none of it.
            return "" if is_out_of_memory(error) else described(error)
        return ""

    def _computed_apart(
        self, sequences: Sequence[Sequence[int]], adapters: Sequence[int]
    ) -> Iterator[Any]:
        """Compute sequences in a cache of their own, without the compiled model.

        Yields hidden states and logits of each step.

        Args:
            sequences: token ids of each, in the order of ``_by_slot``.
            adapters: the number of each sequence's adapter.
        """
        size = self.layout.block_size
        groups = len(self.layout.groups)
        caches = self.layout.allocate(blocks_of(sequences, size, groups), self.device)
        # Unwritten memory may hold NaN by chance.
        for cache in caches.values():
            cache.zero_()
        states = self.layout.allocate_states(len(sequences), self.device)
        batch = self._input_batch(self.device, caches, states)
        most_tokens = self.opgraft_config.scheduler.max_num_batched_tokens
        for step in steps_again(sequences, adapters, size, groups, most_tokens):
            batch.apply(step)
            if step.sequences:
                yield self._compute_logits_again(batch, step.sequences)

    def _compute_logits_again(
        self, batch: InputBatch, sequences: Sequence[ScheduledPart]
    ) -> tuple[Tensor, Tensor | None]:
        inputs = batch.inputs(sequences)
        rows = [(each.request_id, each.count) for each in sequences]
        with attending(inputs.batch), self._adapting(batch, rows):
            hidden = self.model(inputs.input_ids, inputs.positions)
        with self._adapting(batch, [(each.request_id, 1) for each in sequences]):
            return hidden, self.model.compute_logits(hidden[inputs.sampled_rows])

    def _compute_uncached(self, request_id: str) -> Iterator[Any]:
        ids = torch.tensor(list(self.batch.tokens(request_id)), device=self.device)
        positions = torch.arange(len(ids), device=self.device)
        with self._adapting(self.batch, [(request_id, len(ids))]):
            hidden = self.model(ids, positions)
        with self._adapting(self.batch, [(request_id, 1)]):
            logits = self.model.compute_logits(hidden[-1:])
        yield hidden, logits

    def _pop_ended_prompts(self, request_ids: tuple[str, ...]) -> dict[str, list[TokenLogprobs]]:
        """Return the log-probabilities of prompts that end with this step, and forget them."""
        ended = [request_id for request_id in request_ids if request_id in self._prompt_logprobs]
        return {request_id: self._prompt_logprobs.pop(request_id)[1] for request_id in ended}

    def _compute_prompt_logprobs(self, hidden: Tensor, sequences: Sequence[ScheduledPart]) -> None:
        """Compute the log-probabilities of chunks of prompts, for requests that ask for them."""
        first = 0
        for each in sequences:
            if each.request_id in self._prompt_logprobs:
                rows_of_chunk = hidden[first : first + each.count]
                self._compute_logprobs_of_chunk(rows_of_chunk, each)
            first += each.count

    def _compute_logprobs_of_chunk(self, hidden: Tensor, chunk: ScheduledPart) -> None:
        count, known = self._prompt_logprobs[chunk.request_id]
        prompt = self.batch.tokens(chunk.request_id)
        # A few rows at a time: logits are larger than hidden states.
        for done in range(0, chunk.count, ROWS_AT_ONCE):
            part = hidden[done : done + ROWS_AT_ONCE]
            logits = self._logits_of_rows(part, [(chunk.request_id, len(part))])
            if logits is not None:
                known += prompt_logprobs(logits, prompt, chunk.start + done, count)


def _expect_own_steps(parallel: ParallelConfig) -> None:
    """Check that a step of this engine does not wait for idle data replicas.

    Raises:
        ConfigError: experts are on more ranks than the tensor group of this engine has.
    """
    ranks = get_tensor_model_parallel_world_size()
    together = parallel.data_rank is not None and get_dp_group().world_size == parallel.data > 1
    if parallel.expert <= ranks or together:
        return
    plural = "s" if ranks > 1 else ""
    or_all_ranks = f" or {ranks}" if ranks > 1 else ""
    replicas = parallel.expert // ranks or 1
    raise ConfigError(
        f"parallel.expert is {parallel.expert}, and the engine's tensor group has {ranks} "
        f"rank{plural}: an engine steps when it has work, and would wait for data replicas that "
        f"have none. Set parallel.expert to 1{or_all_ranks}, or have as many ranks share the "
        f"experts: parallel.data {replicas} with parallel.tensor {ranks}, which step together, or "
        f"parallel.tensor {parallel.expert}"
    )


def gather_on_first_rank() -> None:
    """Gather logits on the first tensor rank only, unless the runner samples on every rank."""
    communicator = get_tp_group().communicator
    runner: type[ModelRunner] = choose_class(ModelRunner).cls
    if communicator is not None and runner.samples_on_first_rank:
        communicator.use_all_gather = False  # type: ignore[misc]  # of this group only
