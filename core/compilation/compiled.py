"""``opgraft.compile``: a model as one graph with a dynamic batch, lowered to the bound kernels.

``compile`` reads the settings, and asks the cache. Without an entry, ``_built`` captures the model
(``capture.py``), runs passes (``manager.py``), lowers the graph (``lowering.py``) and has a backend
generate code (``backends.py``). The result is a ``Compiled``: a callable in the place of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from opgraft.base.collector import without_collections
from opgraft.base.log import logger
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
from opgraft.compilation.key import ModelKey, key_of
from opgraft.compilation.packages import Packages, temporary
from opgraft.compilation.sources import Sources
from opgraft.compilation.tensors import ModulePlaces
from opgraft.config import CompilationConfig, CompilationMode, OpgraftConfig, set_config
from opgraft.config.compilation import PACKAGED
from opgraft.distributed.groups import get_world_group
from opgraft.errors import CacheEntryError, CompilationError, ConfigError
from opgraft.plugins.host import load_plugins
from opgraft.plugins.selection import current_platform
from opgraft.registry.decision import Candidate, Decision
from opgraft.registry.state import host_state
from torch import Tensor, nn

if TYPE_CHECKING:
    # Few need zip files, keys and fsspec.
    from opgraft.compilation.shared_folder import SharedFolder

_UNKEPT = "the cache of compiled code: nothing is kept: %s"
_NO_FOLDER = (
    "the cache of compiled code is off: %s. Or set compilation_config.cache to false, to go without"
)


class Compiled:
    """A compiled model, with the call of the model and without gradients.

    Attributes:
        model: the model with the parameters. A write to a parameter shows in the next call. Another
            parameter or module in the place of a known one makes the next call an error.
        graph: the captured graph after all passes, with semantic nodes.
        passes: the record of each pass, in order.
        sizes: by size of the batch, the code for one size.
        ranges: by range of sizes, the code for a range, apart from ``sizes``.
        decision: the choices of capture and lowering, with the providers of kernels.
        backend: the name of the backend that made the code.

    Args:
        model: see ``model``.
        signature: the inputs and results of the graph.
        codes: the code for any size of the batch, under ``ALL_SIZES``, and for single sizes and
            ranges.
        decision: the choice of the capture.
    """

    def __init__(
        self,
        model: nn.Module,
        signature: Signature,
        codes: Mapping[range, Code],
        decision: Decision,
    ) -> None:
        self.model = model
        self.backend = decision.chosen
        self._signature = signature
        self._decision = decision
        self._codes = codes
        self._code = codes[ALL_SIZES]
        self.graph = self._code.graph
        self.passes = self._code.passes

        self.sizes: dict[int, Code] = {}
        self.ranges: dict[range, Code] = {}
        for sizes, code in codes.items():
            if len(sizes) == 1:
                self.sizes[sizes[0]] = code
            elif sizes != ALL_SIZES:
                self.ranges[sizes] = code

        self._check = InputCheck(signature.expected, signature.bounds)
        self._written = [place for place, each in enumerate(signature.expected) if each.is_written]
        self._places = _places_of_tensors(model, codes.values())

    @property
    def unkept(self) -> str:
        """The reason why the cache does not hold all code; empty if the cache does."""
        return next((code.unkept for code in self._codes.values() if code.unkept), "")

    @cached_property
    def decision(self) -> Decision:
        """The choices of capture and lowering."""
        # Not in the constructor: to find the lines of classes takes longer than to load an entry.
        made = self._decision
        parts = (*made.parts, *_specialised(self._codes), *self._code.decisions)
        return replace(made, parts=parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result.

        Raises:
            CompilationError: the call differs from the example by more than the dynamic sizes, or
                is under autocast; or the model has other modules or weights than before, or is in
                training mode.
        """
        if self.model.training:
            raise CompilationError(
                f"{type(self.model).__name__} is in training mode, and was compiled in evaluation "
                "mode: call model.eval(), or train the model itself"
            )
        tensors = self._signature.tensors(args, kwargs)
        return self._signature.out_spec.unflatten(self._computed(tensors))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CompilationError(
            f"{type(self.model).__name__} is compiled, and such code is of its process and its "
            "tensors: copy or pickle its model, and compile that; with compilation_config.cache "
            "its code is there at once"
        )

    def verify(self, example: Example) -> None:
        """Compare the code with the model, for several sizes of the batch.

        The sizes are the smallest batch, each size with code or a static graph, and the smallest
        size of each range with code. Without a dynamic size, the example alone is compared.

        Raises:
            CompilationError: the results differ.
        """
        from opgraft.compilation.verification import expect_alike, of_sizes

        signature = self._signature
        flat = signature.flat(example.args, example.kwargs)

        def eager(tensors: list[Tensor]) -> list[Any]:
            args, kwargs = signature.filled(flat, tensors)
            with torch.no_grad():
                result = self.model(*args, **kwargs)
            found: list[Any] = signature.out_spec.flatten_up_to(result)
            return found

        tensors = [flat[place] for place in signature.inputs]
        for sizes in self._sizes_to_verify():
            cut = of_sizes(tensors, signature.expected, sizes)
            expect_alike(self.model, eager, self._computed, cut, sizes)

    def _sizes_to_verify(self) -> list[Mapping[str, int]]:
        """Return combinations of the dynamic sizes, by name."""
        smallest = self._check.smallest
        own = {*self.sizes, *self._code.recorded}
        own |= {sizes[0] for sizes in self.ranges}
        combined: list[Mapping[str, int]] = []
        # Only a graph with one dynamic size has code for single sizes. The largest goes first: the
        # memory of the largest serves the others.
        for name in [*smallest][:1]:
            combined += [{name: size} for size in sorted(own, reverse=True)]
        combined += [{name: size} for name, size in smallest.items()]
        if len(smallest) != 1:
            combined.append(smallest)
        return combined

    def described(self, folder: Path) -> dict[str, Any]:
        """Return a description for the cache, and write tensors into a folder.

        Raises:
            CacheEntryError: a part cannot be written.
        """
        written = []
        for sizes, code in self._codes.items():
            name = f"values-{sizes.start}-{sizes.stop}"
            written.append(([sizes.start, sizes.stop], write_code(code, name, folder)))
        return {
            "backend": self._decision.chosen,
            "signature": write_signature(self._signature),
            "codes": written,
        }

    def _computed(self, tensors: list[Tensor]) -> list[Any]:
        self._check.check(tensors)
        if self._written:
            expect_apart(tensors, self._signature.expected)
        code = self._code
        if len(self._codes) > 1:
            code = self._of_size(self._check.size_of(tensors) or 0)
        self._places.expect_unchanged()
        given = [x if x.is_contiguous() else x.contiguous() for x in tensors]
        with torch.no_grad():
            results = self._signature.completed(code.run(*given))
            # The code has written to a contiguous copy in place of the caller's tensor.
            for place in self._written:
                if given[place] is not tensors[place]:
                    tensors[place].copy_(given[place])
        return results

    def _of_size(self, size: int) -> Code:
        """Return the code for a size of the batch: the nearest of size, range and any size."""
        own = self.sizes.get(size)
        if own:
            return own
        for sizes, code in self.ranges.items():
            if size in sizes:
                return code
        return self._code


def _places_of_tensors(model: nn.Module, codes: Collection[Code]) -> ModulePlaces:
    """Return the places of all tensors that codes use."""
    used = (tensor for code in codes for tensor in code.tensors)
    joint = (part for code in codes for part in code.joint)
    return ModulePlaces(model, used, joint)


def compile(
    model: nn.Module,
    config: CompilationConfig | None = None,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Any:
    """Compile a model for inference: one graph for any size of the batch, with the bound kernels.

    Args:
        model: in evaluation mode. The model stays as it is.
        config: settings of compilation, before the settings that hold here. The default ``level``
            is 2, and the default ``backend`` is the platform's ``compile_backend``.
        args: an example of the positional arguments, with two rows or more.
        kwargs: an example of the keyword arguments. Values other than tensors become constants of
            the graph.
        dynamic_shapes: the sizes that may vary, as for ``torch.export.export``. By default the
            first dimension of each tensor: a batch in common.

    Returns:
        A ``Compiled``, with the call of the model. Under the mode ``NONE``, the model itself. Under
        ``STOCK_TORCH_COMPILE``, the result of ``torch.compile``; in strict mode, nothing is
        compiled after the first call, which is the example if there is one.

    Raises:
        ConfigError: there is no such backend or pass, or settings contradict each other.
        CompilationError: the model cannot be captured or compiled, has other results when compiled,
            or is in training mode.
    """
    expect_module("compile", model)
    if not isinstance(args, tuple):
        raise TypeError(
            f"compile was given args of type {type(args).__name__}, expected a tuple, as (x,)"
        )
    if config is not None and not isinstance(config, CompilationConfig):
        raise TypeError(
            f"compile was given a config of type {type(config).__name__}: an example of the "
            "arguments is args=, as args=(x,)"
        )
    name = type(model).__name__
    for path, module in model.named_modules():
        if module.training:
            part = f"{path} of {name}" if path else name
            raise CompilationError(
                f"compile: {part} is in training mode, and compiled code has no gradients: call "
                "model.eval() first"
            )
    load_plugins()
    given = OpgraftConfig(compilation_config=config or CompilationConfig())
    with (
        set_config(given, origin="opgraft.compile"),
        set_config(_defaults(), origin="the default of opgraft.compile"),
    ):
        example = Example.of(args, kwargs or {}, dynamic_shapes)
        return _compiled(model, example)


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
    # Equal pieces share code in memory, and would be many packages.
    if settings.executed_otherwise:
        return _verified(_built(model, example, settings), example, settings)
    with temporary() as packages:
        return _verified(_built(model, example, settings, packages), example, settings)


def _cache_of(settings: CompilationConfig) -> CompilationCache | None:
    """Return the cache of compiled code, or ``None`` if the cache is off.

    The cache is on by default. ``cache=False`` and ``dump_graphs`` turn the cache off.

    Raises:
        ConfigError: the folder cannot be used, and a setting asks for the cache or names the
            folder.
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
        # Such a backend makes a program per size: the program for the example is made now.
        if compiled.backend in FIXED_SIZES:
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
            f"the pass {guilty.name} ({kind.__module__}.{kind.__qualname__}) changes values: "
            f"{error}. Next: correct the pass, or leave it out by compilation_config.{switch}"
        ) from error


def _pass_that_changes_values(
    model: nn.Module, example: Example, settings: CompilationConfig
) -> GraphPass | None:
    """Return the first pass after which the graph differs from the model, or ``None``.

    The graphs after the first passes run without a backend: a fault of the backend is no fault of
    a pass.
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
    # The graph is right after ``alike`` passes, and wrong after ``different`` passes.
    alike = 0
    different = len(passes)
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
    """Return a compiled model from the cache; without a usable entry, compile and keep one."""
    if settings.user_passes:
        from opgraft.compilation.passes import passes_of

        # This imports the passes: the key holds their sources.
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
    model: nn.Module,
    example: Example,
    settings: CompilationConfig,
    packages: Packages,
    key: ModelKey,
) -> Compiled:
    """Return a compiled model by the packages of a cache, and verify new code."""
    # Such a model has no entry: the cache holds the code of each piece.
    if settings.executed_otherwise:
        compiled = _built(model, example, settings, packages)
        if compiled.unkept:
            logger.warning(_UNKEPT, compiled.unkept)
        return _verified(compiled, example, settings)
    name = key.name
    packages.fetch(name)
    compiled = _taken_or_made(model, example, settings, packages, name)
    # A rank that has lost its entry compares its code, and the other ranks join the collectives.
    with_others = get_world_group().world_size > 1
    # Not under the lock: a model over several ranks waits for the other ranks, and one of the
    # ranks may wait for the lock.
    try:
        if compiled.graph is not None:
            _expect_alike(compiled, example, settings)
        elif key.unseen or with_others:
            compiled.verify(example)
        return compiled
    except CompilationError as error:
        packages.cache.discard(name)
        if compiled.graph is not None:
            raise
        # The other ranks go on, and would not join another comparison.
        if with_others:
            raise CompilationError(
                f"the entry {name} of the cache of compiled code could not be used and was "
                f"removed: {error}. Next: start all ranks again"
            ) from error
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
    """Return a compiled model from its entry; without one, compile the model and write the entry.

    ``absent`` is the reason for the record if there is no entry.
    """
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
    """Return the compiled model of an entry.

    Raises:
        CacheEntryError: there is no entry, or the entry is damaged, or belongs to another model or
            other kernels.
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
    # An entry of another form may raise anything.
    except Exception as error:
        raise CacheEntryError(f"its entry could not be used: {described(error)}") from error
    if entry is None:
        raise CacheEntryError(absent)
    subject = f"compilation of {type(model).__name__}"
    reason = f"taken from the cache of compiled code, the entry {key}"
    by = Candidate(backend, True, "compilation_config.backend")
    decision = Decision(subject, backend, reason, (by,), "compilation_config.cache")
    return Compiled(model, signature, codes, decision)


def _built(
    model: nn.Module,
    example: Example,
    settings: CompilationConfig,
    packages: Packages | None = None,
    cached: str = "",
    most_passes: int | None = None,
) -> Compiled:
    """Capture a model, and generate code for any size, for ``compile_sizes`` and for ranges.

    ``cached`` is the reason why the cache has no entry, for the record.
    """
    # The import takes as long as loading an entry of the cache.
    from opgraft.compilation.generation import codes_of

    captured, codes = codes_of(model, example, settings, packages, most_passes)
    setting = "compilation_config.backend"
    backend = settings.backend
    reason = "one graph for any size, in which each op runs the kernel that it is bound to"
    subject = f"compilation of {type(model).__name__}"
    by = [Candidate(str(backend), True, setting)]
    if cached:
        by.append(Candidate("the cache", False, cached))
    decision = Decision(subject, backend, reason, tuple(by), setting, (captured.decision,))
    return Compiled(model, captured.signature, codes, decision)


def _specialised(codes: Mapping[range, Code]) -> tuple[Decision, ...]:
    """Return a record of the sizes with separate code; nothing if there are none."""
    by = []
    for sizes in codes:
        if sizes == ALL_SIZES:
            continue
        if len(sizes) == 1:
            by.append(Candidate(str(sizes[0]), True, "compilation_config.compile_sizes"))
        else:
            name = f"{sizes[0]}-{sizes[-1]}"
            by.append(Candidate(name, True, "compilation_config.compile_ranges"))
    if not by:
        return ()
    names = ", ".join(candidate.name for candidate in by)
    reason = "a call runs that of its size, else that of its range, else that for any size"
    setting = "compilation_config.compile_sizes and compile_ranges"
    return (Decision("sizes with code of their own", names, reason, tuple(by), setting),)
