"""``opgraft.compile``: a model as one graph with a dynamic batch, lowered to the kernels that its ops are bound to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from opgraft.base.text import described
from opgraft.binding.arguments import expect_module
from opgraft.compat.graphs import FIXED_SIZES
from opgraft.compilation.backends import backend_of, warm_up
from opgraft.compilation.cache import INDEX, CompilationCache
from opgraft.compilation.code import Code
from opgraft.compilation.entries import read_code, read_signature, write_code, write_signature
from opgraft.compilation.example import Example
from opgraft.compilation.graph_pass import ALL_SIZES, GraphPass
from opgraft.compilation.inputs import InputCheck, Signature, expect_apart
from opgraft.compilation.key import Key, key_of
from opgraft.compilation.packages import Packages, temporary
from opgraft.compilation.sources import Sources
from opgraft.compilation.tensors import Places
from opgraft.config import CompilationConfig, CompilationMode, OpgraftConfig, set_config
from opgraft.config.compilation import PACKAGED
from opgraft.distributed.groups import get_world_group
from opgraft.errors import CacheEntryError, CompilationError, ConfigError
from opgraft.logger import logger
from opgraft.machine.memory import without_collections
from opgraft.plugins.host import load_plugins
from opgraft.plugins.selection import current_platform
from opgraft.registry.decision import Candidate, Decision
from opgraft.registry.state import host_state
from torch import Tensor, nn

if TYPE_CHECKING:
    # With what few need: zip files, keys, fsspec.
    from opgraft.compilation.shared_folder import (
        SharedFolder,
    )

_UNKEPT = "the cache of compiled code: nothing is kept: %s"
_NO_FOLDER = (
    "the cache of compiled code is off: %s. Or set compilation_config.cache to false, to go without"
)


class Compiled:
    """A compiled model, called as the model is. It has no gradients.

    Attributes:
        model: whose parameters it computes with. Writes to them are seen as by the model itself, and where others have
            been put in their place, or other modules, a call is an error.
        graph: what was captured, after all passes, with semantic nodes.
        passes: the record of each pass, in order.
        sizes: by size of the batch, the code of those sizes that have their own.
        ranges: the code of ranges that have their own, but for these sizes.
        decision: how it was captured, what its nodes were lowered to, and by whom.
        backend: which made the code.

    Args:
        model: see ``model``.
        signature: how it is called.
        codes: for any size of the batch, ``ALL_SIZES``, and for sizes and ranges of their own.
        decision: how it was captured.
    """

    def __init__(
        self,
        model: nn.Module,
        signature: Signature,
        codes: Mapping[range, Code],
        decision: Decision,
    ) -> None:
        self.model = model
        code = codes[ALL_SIZES]
        self.graph, self.passes = code.graph, code.passes
        self.sizes = {each[0]: own for each, own in codes.items() if len(each) == 1}
        self.ranges = {
            each: own for each, own in codes.items() if len(each) > 1 and each != ALL_SIZES
        }
        self._signature, self._decision, self.backend = signature, decision, decision.chosen
        self._check = InputCheck(signature.expected, signature.bounds)
        self._code, self._codes = code, codes
        self._written = [place for place, each in enumerate(signature.expected) if each.is_written]
        used = (tensor for code in codes.values() for tensor in code.tensors)
        self._places = Places(model, used, (part for code in codes.values() for part in code.joint))

    @property
    def unkept(self) -> str:
        """The reason why the cache has not all of its code; empty where it has."""
        return next((code.unkept for code in self._codes.values() if code.unkept), "")

    @cached_property
    def decision(self) -> Decision:
        """The choices that were made; to say where classes are takes longer than to load them."""
        made = self._decision
        return replace(made, parts=(*made.parts, *_specialised(self._codes), *self._code.decisions))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the model does.

        Raises:
            CompilationError: called otherwise than by the example, but for the dynamic sizes, or under autocast; or the
                model has other modules or weights than it had, or is in training mode.
        """
        if self.model.training:
            raise CompilationError(
                f"{type(self.model).__name__} is in training mode, and was compiled in evaluation mode: call "
                "model.eval(), or train the model itself"
            )
        return self._signature.out_spec.unflatten(
            self._computed(self._signature.tensors(args, kwargs))
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CompilationError(
            f"{type(self.model).__name__} is compiled, and such code is of its process and its tensors: copy or pickle "
            "its model, and compile that; with compilation_config.cache its code is there at once"
        )

    def verify(self, example: Example) -> None:
        """Compare the code with the model for the smallest batch, and for sizes that have code or graphs of their own.

        Of a range with code of its own it is the smallest size. Where no size is dynamic the example is what both
        compute.

        Raises:
            CompilationError: they differ.
        """
        from opgraft.compilation.verification import expect_alike, of_sizes

        signature, flat = self._signature, self._signature.flat(example.args, example.kwargs)

        def eager(tensors: list[Tensor]) -> list[Any]:
            args, kwargs = signature.filled(flat, tensors)
            with torch.no_grad():
                found: list[Any] = signature.out_spec.flatten_up_to(self.model(*args, **kwargs))
            return found

        tensors = [flat[place] for place in signature.inputs]
        smallest = self._check.smallest
        own = {*self.sizes, *(each[0] for each in self.ranges), *self._code.recorded}
        combined = [{name: size} for name in [*smallest][:1] for size in sorted(own, reverse=True)]
        # The memory of the largest serves the others.
        combined += [{name: size} for name, size in smallest.items()]
        for sizes in (*combined, *([smallest] if len(smallest) != 1 else [])):
            cut = of_sizes(tensors, signature.expected, sizes)
            expect_alike(self.model, eager, self._computed, cut, sizes)

    def described(self, folder: Path) -> dict[str, Any]:
        """Describe this for the cache, and write to a folder what the description does not hold.

        Raises:
            CacheEntryError: a part of it cannot be written.
        """
        written = [
            (
                [sizes.start, sizes.stop],
                write_code(code, f"values-{sizes.start}-{sizes.stop}", folder),
            )
            for sizes, code in self._codes.items()
        ]
        return {
            "backend": self._decision.chosen,
            "signature": write_signature(self._signature),
            "codes": written,
        }

    def _computed(self, tensors: list[Tensor]) -> list[Any]:
        self._check.check(tensors)
        if self._written:
            expect_apart(tensors, self._signature.expected)
        code = (
            self._code
            if len(self._codes) == 1
            else self._of_size(self._check.size_of(tensors) or 0)
        )
        self._places.expect_unchanged()
        given = [x if x.is_contiguous() else x.contiguous() for x in tensors]
        with torch.no_grad():
            results = self._signature.completed(code.run(*given))
            for place in self._written:
                if given[place] is not tensors[place]:
                    tensors[place].copy_(given[place])
        return results

    def _of_size(self, size: int) -> Code:
        """Return the code that is nearest to a size of the batch: its own, its range's, or that for any."""
        own = self.sizes.get(size)
        return own or next((code for each, code in self.ranges.items() if size in each), self._code)


def compile(
    model: nn.Module,
    config: CompilationConfig | None = None,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Any:
    """Compile a model for inference: one graph for any size of the batch, in which ops run their providers' kernels.

    Args:
        model: in evaluation mode; it stays what it is.
        config: over the settings that hold here. Where nothing sets ``level`` or ``mode``, the level is 2, and where
            nothing sets ``backend``, it is the platform's ``compile_backend``.
        args: an example of what the model is called with by position, of two rows or more.
        kwargs: the same by name. What is no tensor is a constant of the graph.
        dynamic_shapes: the sizes that may vary, as ``torch.export.export`` takes them; the first one of each tensor, a
            batch that they have in common, if not given.

    Returns:
        A ``Compiled``, to be called as the model is. Under the mode ``NONE`` the model itself, under
        ``STOCK_TORCH_COMPILE`` what ``torch.compile`` makes of it, which in strict mode compiles nothing after its
        first call: that is the example, or the first one where none is given.

    Raises:
        ConfigError: there is no such backend or pass, or settings contradict each other.
        CompilationError: the model cannot be captured or compiled, computes something else when compiled, or is in
            training mode.
    """
    expect_module("compile", model)
    if not isinstance(args, tuple):
        raise TypeError(
            f"compile was given args of type {type(args).__name__}, expected a tuple, as (x,)"
        )
    for path, module in model.named_modules():
        if module.training:
            part = f"{path} of {type(model).__name__}" if path else type(model).__name__
            raise CompilationError(
                f"compile: {part} is in training mode, and compiled code has no gradients: call model.eval() first"
            )
    load_plugins()
    with (
        set_config(
            OpgraftConfig(compilation_config=config or CompilationConfig()),
            origin="opgraft.compile",
        ),
        set_config(_defaults(), origin="the default of opgraft.compile"),
    ):
        return _compiled(model, Example.of(args, kwargs or {}, dynamic_shapes))


def _defaults() -> OpgraftConfig:
    return host_state().settings().compiling(current_platform().compile_backend)


def _compiled(model: nn.Module, example: Example) -> Any:
    settings = host_state().shared_settings().config.compilation_config
    settings.expect_followed()
    if settings.mode is CompilationMode.NONE:
        return model
    if settings.mode is CompilationMode.STOCK_TORCH_COMPILE:
        from opgraft.compilation.stock import compiled_by_torch

        backend_of(str(settings.backend))
        return compiled_by_torch(model, str(settings.backend), example)
    if settings.backend not in PACKAGED:
        return _verified(_built(model, example, settings), example, settings)
    cache = _cache_of(settings)
    if cache is not None:
        return _cached(model, example, settings, cache)
    # Where equal pieces have one code, which would be many packages.
    if settings.executed_otherwise:
        return _verified(_built(model, example, settings), example, settings)
    with temporary() as packages:
        return _verified(_built(model, example, settings, packages), example, settings)


def _cache_of(settings: CompilationConfig) -> CompilationCache | None:
    """Return the cache of compiled code, or ``None`` if the cache is off.

    The cache is on by default. ``cache=False`` and ``dump_graphs`` turn the cache off.

    Raises:
        ConfigError: the folder cannot be used, and a setting asks for the cache or names the folder.
    """
    if settings.cache is False or settings.dump_graphs:
        return None
    try:
        return CompilationCache.of(settings)
    except ConfigError as error:
        if settings.cache or settings.cache_folder or settings.cache_remote:
            raise
        logger.warning_once(_NO_FOLDER, error)
        return None


def _verified(compiled: Compiled, example: Example, settings: CompilationConfig) -> Compiled:
    with warm_up():
        _expect_alike(compiled, example, settings)
        if compiled.backend in FIXED_SIZES:  # whose program for the example is made now, too
            compiled(*example.args, **example.kwargs)
    return compiled


def _expect_alike(compiled: Compiled, example: Example, settings: CompilationConfig) -> None:
    """Compare code with its model.

    Raises:
        CompilationError: code and model differ. The message names the pass that changes values.
    """
    try:
        compiled.verify(example)
    except CompilationError as error:
        # A search on one rank alone would call collectives that the other ranks do not join.
        alone = get_world_group().world_size == 1
        guilty = _pass_that_changes_values(compiled.model, example, settings) if alone else None
        if guilty is None:
            raise
        kind = type(guilty)
        own = kind.__module__.startswith("opgraft.")
        switch = f"pass_config={{{guilty.name!r}: False}}" if own else "user_passes"
        raise CompilationError(
            f"the pass {guilty.name} ({kind.__module__}.{kind.__qualname__}) changes values: {error}. "
            f"Next: correct the pass, or leave it out by compilation_config.{switch}"
        ) from error


def _pass_that_changes_values(
    model: nn.Module, example: Example, settings: CompilationConfig
) -> GraphPass | None:
    """Return the first pass after which the graph differs from the model, or ``None``.

    The graphs after the first passes run without a backend, so that a fault of the backend is no pass's.
    """
    from opgraft.compilation.generation import passes_to_run

    unchanged = replace(settings, backend="eager", cache=False, dump_graphs=None)
    passes = passes_to_run(settings)

    def differs(count: int) -> bool:
        built = _built(model, example, unchanged, most_passes=count)
        try:
            built.verify(example)
        except CompilationError:
            return True
        return False

    if not passes or differs(0) or not differs(len(passes)):
        return None
    alike, different = 0, len(passes)
    while different - alike > 1:
        middle = (alike + different) // 2
        if differs(middle):
            different = middle
        else:
            alike = middle
    return passes[different - 1]


def _cached(
    model: nn.Module, example: Example, settings: CompilationConfig, cache: CompilationCache
) -> Compiled:
    """Take a compiled model from the cache or, where it has none that can be used, compile and keep it."""
    if settings.user_passes:
        from opgraft.compilation.passes import passes_of

        # Which imports them: the key has their sources.
        passes_of(settings.user_passes, settings.pass_config)
    key = key_of(model, example, settings, Sources(cache.folder / INDEX))
    packages = Packages(cache, key.of_code, _remote(settings))
    compiled = _kept(model, example, settings, packages, key)
    packages.share()
    return compiled


def _remote(settings: CompilationConfig) -> SharedFolder | None:
    if settings.cache_remote is None:
        return None
    from opgraft.compilation.shared_folder import SharedFolder

    return SharedFolder.of(settings.cache_remote, settings.cache_key)


def _kept(
    model: nn.Module, example: Example, settings: CompilationConfig, packages: Packages, key: Key
) -> Compiled:
    """Do so by packages that the cache has or gets."""
    # Of which the cache has the code of pieces, and no entry of its own.
    if settings.executed_otherwise:
        compiled = _built(model, example, settings, packages)
        if compiled.unkept:
            logger.warning(_UNKEPT, compiled.unkept)
        return _verified(compiled, example, settings)
    name = key.name
    packages.fetch(name)
    compiled = _taken_or_made(model, example, settings, packages, name)
    # Not while the lock is held: a model that ranks share waits for the others, and one of them may wait for the lock.
    try:
        if compiled.graph is not None:
            _expect_alike(compiled, example, settings)
        elif key.unseen:
            compiled.verify(example)
        return compiled
    except CompilationError as error:
        packages.cache.discard(name)
        if compiled.graph is not None:
            raise
        reason = f"its entry could not be used: {error}"
    made = _taken_or_made(model, example, settings, packages, name, reason)
    return _verified(made, example, settings)


def _taken_or_made(
    model: nn.Module,
    example: Example,
    settings: CompilationConfig,
    packages: Packages,
    key: str,
    absent: str = "it had no such entry",
) -> Compiled:
    """Return a compiled model, as the cache has it from then on; ``absent`` says why it has none."""
    compiled: Compiled | None = None
    try:
        with packages.cache.locked(key):
            try:
                return _restored(model, example, key, packages, absent)
            except CacheEntryError as error:
                reason = str(error)
            logger.info("%s is compiled anew: %s", type(model).__name__, reason)
            compiled = _built(model, example, settings, packages, reason)
            with packages.cache.written(key) as (folder, description):
                description.update(compiled.described(folder))
            packages.made.append(key)
            return compiled
    except (CacheEntryError, OSError) as error:
        logger.warning(_UNKEPT, described(error))
        reason = f"nothing is kept: {described(error)}"
    return compiled or _built(model, example, settings, packages, reason)


@without_collections()
def _restored(
    model: nn.Module, example: Example, key: str, packages: Packages, absent: str
) -> Compiled:
    """Return what an entry holds.

    Raises:
        CacheEntryError: there is none, or it is damaged, or not for this model and these kernels.
    """
    try:
        entry = packages.cache.read(key)
        if entry is not None:
            folder, description = entry
            signature = read_signature(description["signature"], example)
            codes = {
                range(*sizes): read_code(model, code, folder, packages)
                for sizes, code in description["codes"]
            }
            backend = description["backend"]
    except Exception as error:  # of another form; whatever reading that raises
        raise CacheEntryError(f"its entry could not be used: {described(error)}") from error
    if entry is None:
        raise CacheEntryError(absent)
    subject, setting = f"compilation of {type(model).__name__}", "compilation_config.cache"
    reason = f"taken from the cache of compiled code, the entry {key}"
    by = Candidate(backend, True, "compilation_config.backend")
    return Compiled(model, signature, codes, Decision(subject, backend, reason, (by,), setting))


def _built(
    model: nn.Module,
    example: Example,
    settings: CompilationConfig,
    packages: Packages | None = None,
    cached: str = "",
    most_passes: int | None = None,
) -> Compiled:
    """Capture a model, and generate code for any size, for ``compile_sizes`` and ranges; ``cached`` says why."""
    # As long to import as an entry of the cache to load.
    from opgraft.compilation.generation import (
        codes_of,
    )

    captured, codes = codes_of(model, example, settings, packages, most_passes)
    setting, backend = "compilation_config.backend", settings.backend
    reason = "one graph for any size, in which each op runs the kernel that it is bound to"
    subject = f"compilation of {type(model).__name__}"
    by = [Candidate(str(backend), True, setting)]
    by += [Candidate("the cache", False, cached)] if cached else []
    decision = Decision(subject, backend, reason, tuple(by), setting, (captured.decision,))
    return Compiled(model, captured.signature, codes, decision)


def _specialised(codes: Mapping[range, Code]) -> tuple[Decision, ...]:
    """Tell which sizes of the batch have code of their own, where some have."""
    own = [each for each in codes if each != ALL_SIZES]
    names = [str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in own]
    by = tuple(
        Candidate(
            name,
            True,
            "compilation_config.compile_sizes"
            if len(each) == 1
            else "compilation_config.compile_ranges",
        )
        for name, each in zip(names, own, strict=True)
    )
    reason = "a call runs that of its size, else that of its range, else that for any size"
    setting = "compilation_config.compile_sizes and compile_ranges"
    return (
        (Decision("sizes with code of their own", ", ".join(names), reason, by, setting),)
        if own
        else ()
    )
