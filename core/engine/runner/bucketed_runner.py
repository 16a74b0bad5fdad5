"""``BucketedModelRunner``: computes the steps of the engine by programs of a few fixed shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch
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
from opgraft.engine.sampling import Sampled
from opgraft.engine.step import NewSequence, Scheduled, StepResult
from opgraft.errors import ConfigError, RecompilationError, RequestError
from opgraft.logger import logger
from opgraft.models.bucketing import decode_buckets, prefill_buckets
from opgraft.platform import HOST
from opgraft.plugins.selection import current_platform
from torch import Tensor

DECODE_STEP = 8
"""Sequences by which the buckets of decoding differ."""
COPIES = 8
"""Blocks that one call copies."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _as_compiled(method: _Function) -> _Function:
    """Run a method as programs are compiled: in inference mode they would be compiled anew."""
    decorated: _Function = torch.inference_mode(False)(torch.no_grad()(method))
    return decorated


class BucketedModelRunner(ModelRunner):
    """Computes steps by programs that are compiled before the first request, for devices that need one for each shape.

    Any step can be computed: its prompts, or the chunks of these, one after another, each padded to
    the next length of ``prompts``; then its single tokens together, padded to the next number of
    sequences of ``decodes``. Padding writes to a block of the cache that the engine does not know
    of.

    The likeliest tokens are found on the device. Where a request of the step asks for anything
    else, the logits of the step come to the host, and the sampler works there.
    """

    samples_on_first_rank = False
    """Logits are a result of every program, on each rank."""

    def __init__(self, opgraft_config: OpgraftConfig, device: torch.device) -> None:
        super().__init__(opgraft_config, device)
        self.programs: dict[StepShape, Any] = {}
        self.built = 0

    @property
    def backend(self) -> str:
        """Return the backend of ``torch.compile``: that of the platform, unless a setting has models compiled."""
        compilation = self.opgraft_config.compilation_config
        is_set = compilation.mode is CompilationMode.STOCK_TORCH_COMPILE
        return str(compilation.backend) if is_set else current_platform().compile_backend

    def compilations(self) -> int:
        """Count what was compiled so far; a subclass asks the device's compiler."""
        return self.built

    def operators_of(self, cache: Tensor) -> CacheOperators:
        """Return the operators by which the backend learns what becomes of a cache; a subclass has some."""
        return CacheOperators()

    def whole(self, dims: int) -> tuple[Any, ...]:
        """Return the operator that ``compiled`` asks for, for a result of so many dimensions; a subclass has one."""
        return ()

    def load_model(self) -> None:
        """Make the model and read its weights.

        Raises:
            ConfigError: the model, or a setting, does not go with programs of fixed shapes.
        """
        super().load_model()
        self._expect_programs()
        limits, longest = self.opgraft_config.scheduler, self.model.max_position
        self.decodes = decode_buckets(
            -(-limits.max_num_seqs // DECODE_STEP) * DECODE_STEP, DECODE_STEP
        )
        self.prompts = prefill_buckets(min(limits.max_num_batched_tokens, longest))
        self.width = -(-longest // self.layout.block_size)
        self.firsts = [group[0] for group in self.layout.groups]

    @property
    def shapes(self) -> list[StepShape]:
        """Return the shapes of all programs."""
        return [*map(self._decode, self.decodes.sizes), *map(self._prompt, self.prompts.sizes)]

    def allocate_cache(self, num_blocks: int, num_states: int = 0) -> None:
        """Make the cache, with one more block, for padding; sequences that were known are forgotten."""
        super().allocate_cache(num_blocks + 1, num_states)
        self.scratch = num_blocks
        self.batch = self._input_batch(torch.device(HOST), self.caches, self.states)
        self.tensors = list({id(cache): cache for cache in self.caches.values()}.values())

    def compile_model(self) -> None:
        """Compile all programs.

        Raises:
            ConfigError: the model cannot be traced, or the backend does not compile here.
        """
        started, shapes = perf_counter(), self.shapes
        before = self.compilations()
        for number, shape in enumerate(shapes, 1):
            since = perf_counter()
            self._explained(self._build, shape)
            logger.info(
                "program %d of %d, %s: %.1f s", number, len(shapes), shape, perf_counter() - since
            )
        self._explained(self._build_copies)
        self.known = self.compilations()
        logger.info("%d programs in %.1f s", self.known - before, perf_counter() - started)

    def remark(self, owner: object) -> str:
        return f"{len(self.programs)} shapes are compiled by {self.backend}"

    def bound_of_largest_step(self) -> int | None:
        """Return ``None``: ``peak_of_largest_step`` is a bound itself, and computes nothing."""
        return None

    def peak_of_largest_step(
        self, free: Callable[[], int], called: Callable[[], object] = lambda: None
    ) -> int:
        """Return a bound on the bytes that the largest programs take beside weights and cache.

        It counts what their operators return, as if each did so in memory of its own: between the
        operators of a program nobody can look at the device.

        Args:
            free: not asked.
            called: not called.
        """
        self.allocate_cache(1)
        largest = [self._prompt(self.prompts.sizes[-1]), self._decode(self.decodes.sizes[-1])]
        peaks = [peak_bytes(exported(*self._arguments(shape))) for shape in largest]
        del self.caches, self.states, self.batch, self.tensors
        return max(peaks)

    def _expect_programs(self) -> None:
        """Raise ``ConfigError`` for what no program of fixed shapes computes."""
        why = None
        unpadded = [name for name, layer in self.layout.layers.items() if not layer.takes_padding]
        if self.opgraft_config.model.batch_invariant:
            why = "model.batch_invariant is set, and each shape computes in an order of its own: unset it"
        elif self.opgraft_config.compilation_config.mode in (
            CompilationMode.DYNAMO_TRACE_ONCE,
            CompilationMode.FULL,
        ):
            why = "compilation_config.mode, or level, has opgraft capture the model: set the mode to NONE"
        elif self.opgraft_config.parallel.pipeline > 1:
            why = "parallel.pipeline is above 1, and a program has the whole model: set it to 1"
        elif self.model.fitted_ropes:
            why = "the model has ropes that depend on the length of the context"
        elif self.layout.states:
            why = f"the layer {next(iter(self.layout.states))!r} keeps a state of each sequence"
        elif unpadded:
            why = f"the attention layer {unpadded[0]!r} does not take padded batches: its takes_padding is False"
        if why:
            raise ConfigError(
                f"this device computes by programs of fixed shapes, which do not go with this: {why}"
            )

    def _decode(self, sequences: int) -> StepShape:
        return StepShape(sequences, 1, self.width, len(self.firsts))

    def _prompt(self, tokens: int) -> StepShape:
        return StepShape(1, tokens, self.width, len(self.firsts))

    def _arguments(self, shape: StepShape) -> tuple[StepModule, Tensor, list[Tensor]]:
        """Return a module of a shape, and what it is called with where a step has no sequence."""
        places = {id(cache): place for place, cache in enumerate(self.tensors)}
        groups = [
            {name: places[id(self.caches[name])] for name in group} for group in self.layout.groups
        ]
        module = StepModule(self.model, groups, shape, self.layout.block_size)
        return (
            module,
            shape.empty(self.scratch, self.layout.block_size).to(self.device),
            self.tensors,
        )

    @_as_compiled
    def _build(self, shape: StepShape) -> None:
        module, inputs, caches = self._arguments(shape)
        self.programs[shape] = self._compiled(module, inputs, caches)
        self.programs[shape](inputs, *caches)[0].to(HOST)

    @_as_compiled
    def _build_copies(self) -> None:
        pairs = torch.full((COPIES, 2), self.scratch).to(self.device)
        self._copy = self._compiled(CopyModule(), pairs, self.tensors)
        self._copy(pairs, *self.tensors)

    def _compiled(self, module: torch.nn.Module, inputs: Tensor, caches: Sequence[Tensor]) -> Any:
        self.built += 1
        operators = [self.operators_of(cache) for cache in caches]
        return StepGraph(
            compiled(exported(module, inputs, caches), self.backend, operators, self.whole)
        )

    def _explained(self, build: Callable[..., None], *arguments: Any) -> None:
        try:
            build(*arguments)
        except Exception as error:  # whatever a backend raises
            raise ConfigError(
                "the model cannot be compiled for fixed shapes by torch.compile with the backend "
                f"{self.backend}: {described(error)}. Set another compilation_config.backend, or model.implementation"
            ) from error

    @_as_compiled
    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for begin in range(0, len(copies), COPIES):
            pairs = [*copies[begin : begin + COPIES]]
            pairs += [(self.scratch, self.scratch)] * (COPIES - len(pairs))
            self._copy(torch.tensor(pairs).to(self.device), *self.tensors)

    def _add(self, new: NewSequence) -> None:
        if new.params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs asks for the logits of all tokens of a prompt, and the programs of this device give "
                "those of the last one: leave it out"
            )
        super()._add(new)

    @_as_compiled
    def _compute(
        self, sequences: Sequence[Scheduled], started: float, *, continues: bool
    ) -> StepResult:
        """Start the programs of a step one after another, and take the tokens of all."""
        launched = [self._launch(part) for part in self._parts(sequences)]
        prepared = perf_counter()
        names = tuple(name for sampled, _, _ in launched for name in sampled)
        tokens = _on_host([(len(sampled), found) for sampled, found, _ in launched])
        computed = perf_counter()
        result = StepResult({})
        if names:
            self.sampling.select(names)
            plain = self._takes_likeliest(launched[0][2].shape[1]) and bool((tokens >= 0).all())
            sampled = (
                Sampled(tokens)
                if plain
                else self._sampled([(len(names), each) for names, _, each in launched])
            )
            result = self._take(sampled, names)
        self._expect_known_programs()
        seconds = {
            "inputs": prepared - started,
            "model": computed - prepared,
            "sample": perf_counter() - computed,
        }
        return dataclasses.replace(result, seconds=seconds)

    def _parts(self, sequences: Sequence[Scheduled]) -> list[list[Scheduled]]:
        """Divide a step into prompts and the single tokens of all others."""
        single = [each for each in sequences if each.count == 1]
        return [[each] for each in sequences if each.count > 1] + ([single] if single else [])

    def _launch(self, part: list[Scheduled]) -> tuple[tuple[str, ...], Tensor, Tensor]:
        """Start the program of a part; return who samples, and tokens and logits on the device, those of these first.

        Among single tokens those that sample come first.
        """
        part = sorted(part, key=lambda each: not each.samples)
        prompt = part[0].count > 1
        shape = (
            self._prompt(self.prompts.lookup(part[0].count))
            if prompt
            else self._decode(self.decodes.lookup(len(part)))
        )
        inputs = self.batch.inputs(part)
        packed = shape.padded(inputs, self.firsts, self.scratch, self.layout.block_size)
        tokens, logits = self.programs[shape](packed.to(self.device), *self.tensors)
        return inputs.sampled, tokens, logits

    def _takes_likeliest(self, vocabulary: int) -> bool:
        plan = self.sampling.plan(vocabulary, torch.device(HOST))
        return not (plan.drawn or plan.adjustments.any or plan.logprobs)

    def _sampled(self, logits: Sequence[tuple[int, Tensor]]) -> Sampled:
        sampled: Sampled = self.sampler(_on_host(logits), self.sampling)
        return sampled

    def _expect_known_programs(self) -> None:
        """Say that something was compiled while requests run, which stops all of them for as long as it takes.

        Raises:
            RecompilationError: it was, under ``compilation_config.fail_on_recompile``.
        """
        count, self.known = self.compilations() - self.known, self.compilations()
        if not count:
            return
        message = (
            f"{count} program{'s' * (count > 1)} compiled in a step, though all shapes were before the first request: "
            "something besides the engine computes on the device in this process, or a part of the model depends on "
            "values"
        )
        if self.opgraft_config.compilation_config.fail_on_recompile:
            raise RecompilationError(
                f"{message}. Unset compilation_config.fail_on_recompile to go on with a warning"
            )
        logger.warning("%s", message)


def _on_host(parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return the first rows of some tensors, one below the other; all rows come, as to cut them is a program more."""
    return torch.cat([rows.to(HOST)[:count] for count, rows in parts])
