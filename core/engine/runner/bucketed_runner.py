"""``BucketedModelRunner``: computes the steps of the engine by programs of a few fixed shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.config import CompilationMode, OpgraftConfig
from opgraft.engine.runner.model_runner import ModelRunner
from opgraft.engine.runner.step_program import (
    CacheOperators,
    CopyModule,
    StepGraph,
    StepModule,
    StepShape,
    compiled,
    exported,
    peak_bytes,
)
from opgraft.engine.sampling import SampledTokens
from opgraft.engine.sampling.replaced import sampled_by
from opgraft.engine.step import NewSequence, ScheduledPart, StepResult
from opgraft.errors import ConfigError, RecompilationError, RequestError
from opgraft.models.bucketing import decode_buckets, prefill_buckets
from opgraft.platform import HOST
from opgraft.plugins.selection import current_platform
from torch import Tensor
from torch.fx import GraphModule

DECODE_STEP = 8
"""Difference between the buckets of decoding, in sequences."""
COPIES = 8
"""Blocks of one call of the program of copies."""

_CAPTURING = (CompilationMode.DYNAMO_TRACE_ONCE, CompilationMode.FULL)
"""Modes in which opgraft captures the model as a graph."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _PendingResults(NamedTuple):
    """The results of a program that may still run.

    Attributes:
        sampling: ids of the requests to sample for. Their rows are the first ones.
        tokens: ``[rows]``, on the device.
        logits: ``[rows, vocabulary]``, on the device.
    """

    sampling: tuple[str, ...]
    tokens: Tensor
    logits: Tensor


def _as_compiled(method: _Function) -> _Function:
    """Return a method that runs without inference mode.

    Programs are compiled without. In inference mode, torch would compile them anew.
    """
    decorated: _Function = torch.inference_mode(False)(torch.no_grad()(method))
    return decorated


class BucketedModelRunner(ModelRunner):
    """Computes steps by programs of fixed shapes, compiled before the first request.

    Some devices need a program for each shape. Any step can be computed so. Prompts, or chunks of
    prompts, come one after another, each padded to the next length of ``prompts``. Then all single
    tokens come together, padded to the next number of sequences of ``decodes``. Padding writes to a
    block of the cache unknown to the engine.

    For example, a step with a prompt of 100 tokens and five single tokens runs the program of 128
    tokens, if this is a length of ``prompts``, and the program of 8 sequences.

    The device finds the likeliest tokens. If a request of the step asks for anything else, the
    logits of the step come to the host, and the sampler works there.
    """

    samples_on_first_rank = False
    """Every program returns logits on each rank."""

    stores_blocks: ClassVar[bool] = False
    takes_adapters: ClassVar[bool] = False

    def __init__(self, opgraft_config: OpgraftConfig, device: torch.device) -> None:
        super().__init__(opgraft_config, device)
        self.programs: dict[StepShape, Any] = {}
        self.built = 0

    @property
    def backend(self) -> str:
        """Return the backend of ``torch.compile``, from the settings or the platform."""
        compilation = self.opgraft_config.compilation_config
        is_set = compilation.mode is CompilationMode.STOCK_TORCH_COMPILE
        return str(compilation.backend) if is_set else current_platform().compile_backend

    def compilations(self) -> int:
        """Return the number of compilations so far. A subclass asks the device's compiler."""
        return self.built

    def lowered(self, program: GraphModule) -> GraphModule:
        """Return a program for the backend, by default unchanged. A subclass replaces operators."""
        return program

    def operators_of(self, cache: Tensor) -> CacheOperators:
        """Return the operators that tell the backend about a cache. A subclass has some."""
        return CacheOperators()

    def whole(self, dims: int) -> tuple[Any, ...]:
        """Return the argument ``whole`` of ``compiled`` for a number of dimensions.

        A subclass has an operator.
        """
        return ()

    def load_model(self) -> None:
        """Make the model and read its weights.

        Raises:
            ConfigError: programs of fixed shapes cannot compute the model, or follow a setting.
        """
        super().load_model()
        self._expect_programs()
        limits = self.opgraft_config.scheduler
        longest = self.model.max_position
        most_sequences = -(-limits.max_num_seqs // DECODE_STEP) * DECODE_STEP
        self.decodes = decode_buckets(most_sequences, DECODE_STEP)
        self.prompts = prefill_buckets(min(limits.max_num_batched_tokens, longest))
        self.width = -(-longest // self.layout.block_size)
        self.firsts = [group[0] for group in self.layout.groups]

    @property
    def shapes(self) -> list[StepShape]:
        """Return the shapes of all programs."""
        return [*map(self._decode, self.decodes.sizes), *map(self._prompt, self.prompts.sizes)]

    def allocate_cache(self, num_blocks: int, num_states: int = 0) -> None:
        """Make the cache, with one more block for padding. Forget all sequences."""
        super().allocate_cache(num_blocks + 1, num_states)
        self.scratch = num_blocks
        self.batch = self._input_batch(torch.device(HOST), self.caches, self.states)
        # Layers of several groups share a tensor.
        self.tensors = list({id(cache): cache for cache in self.caches.values()}.values())

    def compile_model(self) -> None:
        """Compile all programs.

        Raises:
            ConfigError: the model cannot be traced, or the backend does not compile here.
        """
        started = perf_counter()
        shapes = self.shapes
        before = self.compilations()
        for number, shape in enumerate(shapes, 1):
            since = perf_counter()
            self._explained(self._build, shape)
            seconds = perf_counter() - since
            logger.info("program %d of %d, %s: %.1f s", number, len(shapes), shape, seconds)
        self._explained(self._build_copies)
        self.known = self.compilations()
        logger.info("%d programs in %.1f s", self.known - before, perf_counter() - started)

    def remark(self, owner: object) -> str:
        return f"{len(self.programs)} shapes are compiled by {self.backend}"

    def bound_of_largest_step(self) -> int | None:
        """Return ``None``, because ``peak_of_largest_step`` is a bound and computes nothing."""
        return None

    def peak_of_largest_step(
        self, free: Callable[[], int], called: Callable[[], object] = lambda: None
    ) -> int:
        """Return a bound on the bytes of the largest programs, beside weights and cache.

        The bound is a count of the results of operators, as if each result had memory of its own.
        The device cannot be asked for its memory in the middle of a program.

        Args:
            free: unused.
            called: unused.
        """
        self.allocate_cache(1)
        largest = [self._prompt(self.prompts.sizes[-1]), self._decode(self.decodes.sizes[-1])]
        peaks = [peak_bytes(exported(*self._arguments(shape))) for shape in largest]
        del self.caches, self.states, self.batch, self.tensors
        return max(peaks)

    def _expect_programs(self) -> None:
        """Check that programs of fixed shapes can compute the model and follow the settings.

        Raises:
            ConfigError: they cannot; the message names the reason.
        """
        why = self._obstacle()
        if why:
            raise ConfigError(
                "this device computes by programs of fixed shapes, which do not go with this: "
                f"{why}"
            )

    def _obstacle(self) -> str:
        """Return the reason against programs of fixed shapes; empty if there is none."""
        config = self.opgraft_config
        if config.model.batch_invariant:
            return (
                "model.batch_invariant is set, and each shape computes in an order of its own: "
                "unset it"
            )
        if config.speculation.method is not None:
            return (
                "speculation.method is set, and a program has the logits of a sequence's last "
                "token alone: leave it out"
            )
        if config.compilation_config.mode in _CAPTURING:
            return (
                "compilation_config.mode, or level, has opgraft capture the model: set the mode "
                "to NONE"
            )
        if config.parallel.pipeline > 1:
            return "parallel.pipeline is above 1, and a program has the whole model: set it to 1"
        if self.model.fitted_ropes:
            return "the model has ropes that depend on the length of the context"
        for name in self.layout.states:
            return f"the layer {name!r} keeps a state of each sequence"
        for name, layer in self.layout.layers.items():
            if not layer.takes_padding:
                return (
                    f"the attention layer {name!r} does not take padded batches: its "
                    "takes_padding is False"
                )
        return ""

    def _decode(self, sequences: int) -> StepShape:
        return StepShape(sequences, 1, self.width, len(self.firsts))

    def _prompt(self, tokens: int) -> StepShape:
        return StepShape(1, tokens, self.width, len(self.firsts))

    def _arguments(self, shape: StepShape) -> tuple[StepModule, Tensor, list[Tensor]]:
        """Return a module of a shape, and the arguments for a step without sequences."""
        places = {id(cache): place for place, cache in enumerate(self.tensors)}
        groups = [
            {name: places[id(self.caches[name])] for name in group} for group in self.layout.groups
        ]
        module = StepModule(self.model, groups, shape, self.layout.block_size)
        inputs = shape.empty(self.scratch, self.layout.block_size)
        return module, inputs.to(self.device), self.tensors

    @_as_compiled
    def _build(self, shape: StepShape) -> None:
        module, inputs, caches = self._arguments(shape)
        program = self._compiled(module, inputs, caches)
        self.programs[shape] = program
        # The first call compiles, and the copy to the host waits for its end.
        program(inputs, *caches)[0].to(HOST)

    @_as_compiled
    def _build_copies(self) -> None:
        pairs = torch.full((COPIES, 2), self.scratch).to(self.device)
        self._copy = self._compiled(CopyModule(), pairs, self.tensors)
        self._copy(pairs, *self.tensors)

    def _compiled(self, module: torch.nn.Module, inputs: Tensor, caches: Sequence[Tensor]) -> Any:
        self.built += 1
        operators = [self.operators_of(cache) for cache in caches]
        graph = self.lowered(exported(module, inputs, caches))
        return StepGraph(compiled(graph, self.backend, operators, self.whole))

    def _explained(self, build: Callable[..., None], *arguments: Any) -> None:
        try:
            build(*arguments)
        # Backends raise errors of all classes.
        except Exception as error:
            raise ConfigError(
                "the model cannot be compiled for fixed shapes by torch.compile with the backend "
                f"{self.backend}: {described(error)}. Set another compilation_config.backend, or "
                "model.implementation"
            ) from error

    @_as_compiled
    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for begin in range(0, len(copies), COPIES):
            pairs = [*copies[begin : begin + COPIES]]
            # A copy of the block for padding onto itself fills up the fixed number.
            padding = (self.scratch, self.scratch)
            pairs += [padding] * (COPIES - len(pairs))
            blocks = torch.tensor(pairs).to(self.device)
            self._copy(blocks, *self.tensors)

    def _add(self, new: NewSequence) -> None:
        if new.params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs asks for the logits of all tokens of a prompt, and the programs "
                "of this device give those of the last one: leave it out"
            )
        super()._add(new)

    @_as_compiled
    def _compute(
        self, sequences: Sequence[ScheduledPart], started: float, *, continues: bool
    ) -> StepResult:
        """Start the programs of a step one after another, and take the tokens of all."""
        launched = [self._launch(part) for part in self._parts(sequences)]
        prepared = perf_counter()
        request_ids = tuple(request_id for each in launched for request_id in each.sampling)
        tokens = _on_host([(len(each.sampling), each.tokens) for each in launched])
        computed = perf_counter()
        result = StepResult({})
        if request_ids:
            self.sampling.select(request_ids)
            vocabulary = launched[0].logits.shape[1]
            if self._takes_likeliest(vocabulary) and bool((tokens >= 0).all()):
                sampled = SampledTokens(tokens)
            else:
                sampled = self._sampled([(len(each.sampling), each.logits) for each in launched])
            result = self._append_sampled(sampled, request_ids)
        self._expect_known_programs()
        seconds = {
            "inputs": prepared - started,
            "model": computed - prepared,
            "sample": perf_counter() - computed,
        }
        return dataclasses.replace(result, seconds=seconds)

    def _parts(self, sequences: Sequence[ScheduledPart]) -> list[list[ScheduledPart]]:
        """Divide a step into parts: each prompt alone, and all single tokens together."""
        parts = [[each] for each in sequences if each.count > 1]
        single = [each for each in sequences if each.count == 1]
        if single:
            parts.append(single)
        return parts

    def _launch(self, part: list[ScheduledPart]) -> _PendingResults:
        """Start the program of a part, and return its results without waiting for them."""
        # The rows of sampling sequences come first, so that the others can be cut off.
        part = sorted(part, key=lambda each: not each.samples)
        length = part[0].count
        if length > 1:
            shape = self._prompt(self.prompts.lookup(length))
        else:
            shape = self._decode(self.decodes.lookup(len(part)))
        inputs = self.batch.inputs(part)
        packed = shape.padded(inputs, self.firsts, self.scratch, self.layout.block_size)
        tokens, logits = self.programs[shape](packed.to(self.device), *self.tensors)
        return _PendingResults(inputs.sampling, tokens, logits)

    def _takes_likeliest(self, vocabulary: int) -> bool:
        plan = self.sampling.plan(vocabulary, torch.device(HOST))
        return not (plan.drawn or plan.adjustments.any or plan.logprobs)

    def _sampled(self, logits: Sequence[tuple[int, Tensor]]) -> SampledTokens:
        return sampled_by(self.sampler, _on_host(logits), self.sampling)

    def _expect_known_programs(self) -> None:
        """Warn of a compilation in the middle of a step. All requests wait for the compiler then.

        Raises:
            RecompilationError: there was one, and ``compilation_config.fail_on_recompile`` is set.
        """
        now = self.compilations()
        count = now - self.known
        self.known = now
        if not count:
            return
        message = (
            f"{count} program{'s' * (count > 1)} compiled in a step, though all shapes were before "
            "the first request: something besides the engine computes on the device in this "
            "process, or a part of the model depends on values"
        )
        if self.opgraft_config.compilation_config.fail_on_recompile:
            raise RecompilationError(
                f"{message}. Unset compilation_config.fail_on_recompile to go on with a warning"
            )
        logger.warning("%s", message)


def _on_host(parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return the first rows of some tensors as one tensor on the host.

    Args:
        parts: for each tensor, the number of rows, and the tensor.
    """
    # Cut on the host: on the device, a cut would be one more program.
    return torch.cat([rows.to(HOST)[:count] for count, rows in parts])
