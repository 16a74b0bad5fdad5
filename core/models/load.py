"""Fill a model from the tensors of a checkpoint. Only the parts that a rank needs are read."""

from __future__ import annotations

import difflib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from opgraft.base.text import described
from opgraft.binding.blame import replaced_owner
from opgraft.errors import CheckpointError, OpgraftError, WeightError
from opgraft.machine.memory import release_free_memory
from opgraft.models.mapped import LEAST_BYTES, MappedWeights
from opgraft.models.names import IGNORED, ShardId, Target, Targets, WeightsMapper, is_ignored
from opgraft.ops.embedding.vocab import ParallelLMHead, VocabParallelEmbedding
from opgraft.ops.weights import (
    LoadedTensor,
    call_post_load_hook,
    default_weight_loader,
    has_post_load_hook,
    is_only_copying,
    noted_copies,
)
from opgraft.registry.state import host_state
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import nn


@dataclass(frozen=True)
class LoadReport:
    """The outcome of loading.

    Attributes:
        tensors: the number of tensors of the checkpoint that reached the model.
        ignored: the names of tensors that a pattern or a mapper left out, or that are tied to
            another tensor.
        seconds: the duration of the loading.
    """

    tensors: int
    ignored: tuple[str, ...]
    seconds: float


@torch.no_grad()
def load_weights(
    model: nn.Module,
    weights: Mapping[str, LoadedTensor],
    *,
    mapper: WeightsMapper | None = None,
    ignored: Sequence[str] = (),
    progress: bool = False,
) -> LoadReport:
    """Fill all parameters and persistent buffers of ``model``, then call the modules' hooks.

    The model's ``packed_modules_mapping`` (see ``HasPackedModules``) has the layers of the
    checkpoint that the model merges. A parameter with a ``weight_loader(parameter, loaded[,
    shard_id])`` is filled by that function. ``loaded`` is a ``LoadedTensor``: the loader reads the
    part that the rank keeps. Floating-point numbers are converted to the parameter's dtype, unless
    the parameter has 8 bits. A loader of other numbers sets ``converts = True`` on its parameter.

    Args:
        model: constructed, on its device, with its dtypes.
        weights: tensors by name, as ``open_weights(...).tensors`` or a dictionary of tensors.
        mapper: changes names of the checkpoint to names of the model.
        ignored: patterns of names (``*`` matches all) that the model does not use.
        progress: show a bar on stderr if stderr is a terminal.

    Raises:
        CheckpointError: tensors are missing, have no place, or do not fit. The message lists all
            of these.
        WeightError: the hook of a module raised.
    """
    start = time.perf_counter()
    targets = Targets(model)
    mapper = mapper or WeightsMapper()
    plan = plan_of(targets, weights, mapper, (*IGNORED, *ignored))
    missing = targets.missing([target for target, _ in plan.fills])
    ways_to_tie = _ways_to_tie(model)
    # Faults are looked for before the model is filled, which may take minutes.
    problems = _problems(plan, targets, weights, missing, ways_to_tie)
    count = len(plan.fills)
    spelled = [targets.spelled(mapper.spellings(name)) or name for name in plan.unexpected]
    if not problems:
        # A module may release a weight once it is packed. The targets would hold the weight.
        del targets
        hooks = _Hooks(model, [target.name for target, _ in plan.fills])
        problems = _fill_all(plan.fills, hooks, progress)
    if problems:
        untied_only = len(problems) == len(ways_to_tie.keys() & missing)
        replaced = replaced_owner(model, missing, spelled)
        raise _mismatch(model, problems, untied_only, replaced)
    hooks.finish()
    return LoadReport(count, tuple(plan.left_out), time.perf_counter() - start)


_CHUNK = 1 << 20
"""Numbers of two tensors that are compared at once."""

_RELEASES = 64
"""Free memory is given back so many times during one loading, about a millisecond each time."""

_LEAST_RELEASED = 1 << 22
"""Bytes of weights that are filled at least before free memory is given back again."""

_Fills = list[tuple[Target, LoadedTensor]]
"""Targets with their tensors, in the order of the model."""


@dataclass
class LoadPlan:
    """The use of each tensor of a checkpoint.

    Attributes:
        fills: the targets with their tensors, in the order of the model.
        left_out: the names of tensors that are not read.
        unexpected: the names of tensors without a place in the model.
        pairs: two names each. The tensor of the first name fills the target of both.
    """

    fills: _Fills = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)


def plan_of(
    targets: Targets,
    weights: Mapping[str, LoadedTensor],
    mapper: WeightsMapper,
    ignored: Sequence[str],
) -> LoadPlan:
    """Decide the use of each tensor."""
    plan = LoadPlan()
    taken: dict[tuple[int, ShardId | None], str] = {}
    for name, loaded in weights.items():
        mapped = targets.spelled(mapper.spellings(name))
        target = None if mapped is None else targets.by_source.get(mapped)
        if target is None:
            is_needless = _is_needless(name, mapped, loaded, targets, ignored)
            names = plan.left_out if is_needless else plan.unexpected
            names.append(name)
            continue
        key = (id(target.tensor), target.shard_id)
        if key not in taken:
            taken[key] = name
            plan.fills.append((target, loaded))
            continue
        # Tied parameters are one tensor, which the first name fills.
        plan.left_out.append(name)
        plan.pairs.append((taken[key], name))
    # In the order of the model, modules are complete early, and their hooks free memory early.
    order = {name: place for place, name in enumerate(targets.tensors)}
    plan.fills.sort(key=lambda item: order[item[0].name])
    return plan


def _problems(
    plan: LoadPlan,
    targets: Targets,
    weights: Mapping[str, LoadedTensor],
    missing: Sequence[str],
    ways_to_tie: Mapping[str, str],
) -> list[str]:
    """Return a line for each tensor that is missing, has no place, or does not fit."""
    problems = []
    for name in missing:
        remark = ways_to_tie.get(name) or _near(name, plan.unexpected)
        problems.append(f"{name!r:.200} is missing{remark}")
    for name in plan.unexpected:
        problems.append(f"{name!r:.200} has no place{_near(name, targets.by_source)}")
    for target, loaded in plan.fills:
        misfit = _misfit(target, loaded)
        if misfit:
            problems.append(misfit)
    for first, second in plan.pairs:
        # A model that ties two different tensors would lose one of them in silence.
        if not _are_equal(weights[first], weights[second]):
            problems.append(
                f"{second!r:.200} differs from {first!r:.200}, and the model has one parameter "
                "for both"
            )
    return problems


def _is_needless(
    name: str,
    mapped: str | None,
    loaded: LoadedTensor,
    targets: Targets,
    ignored: Sequence[str],
) -> bool:
    """Return True for a tensor without a target that the model does not need."""
    # The mapper has dropped the tensor.
    if mapped is None:
        return True
    if targets.is_elsewhere(mapped) or is_ignored(name, ignored):
        return True
    return _adds_nothing(name, mapped, loaded, targets)


def _adds_nothing(name: str, mapped: str, loaded: LoadedTensor, targets: Targets) -> bool:
    """Return True for a mask, and for a bias of zeros, which AutoGPTQ adds to a layer."""
    if _is_mask(name, loaded):
        return True
    layer, _, last = mapped.rpartition(".")
    if last != "bias" or not targets.has_layer(layer):
        return False
    # Last, as this reads the tensor.
    return not bool(loaded[...].any())


def _is_mask(name: str, loaded: LoadedTensor) -> bool:
    """Return True for a causal mask, or its large negative number, in checkpoints like GPT-2's."""
    path, _, last = name.rpartition(".")
    if not path.endswith(("attn", "attention")):
        return False
    if last == "masked_bias":
        return True
    # The mask shares the name of a bias, which has one dimension.
    shape = tuple(loaded.shape)
    if last != "bias" or len(shape) != 4:
        return False
    return shape[:2] == (1, 1) and shape[2] == shape[3]


def _mismatch(
    model: nn.Module, problems: Sequence[str], untied_only: bool, replaced: str
) -> CheckpointError:
    """Make the error that lists all problems.

    Args:
        model: the model that is loaded.
        problems: a line for each.
        untied_only: each problem is a head that the model should tie to the embedding.
        replaced: a sentence about a plugin's class with one of the tensors; empty without one.
    """
    advice = "give the configuration and the weights of one model, or save both again"
    if untied_only:
        advice = "tie the head where the model is constructed"
    if replaced:
        advice = f"a layer with other names of weights is a plugin's: {replaced}"
    name = type(model).__name__
    return CheckpointError.listing(
        f"the weights are not those of the {name} that the configuration describes",
        problems,
        advice,
    )


def _ways_to_tie(model: nn.Module) -> dict[str, str]:
    """Return the name of a head's weight → a remark with the call that ties the head.

    Heads of a model whose config ties no weights, and heads that are tied, are left out.
    """
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return {}
    heads = []
    embeddings = []
    for path, layer in model.named_modules():
        if not isinstance(layer, VocabParallelEmbedding):
            continue
        # Heads derive from the class of embeddings, and look no ids up.
        if layer.looks_up:
            embeddings.append(path)
        if isinstance(layer, ParallelLMHead) and not layer.tied:
            heads.append(path)
    embedding = embeddings[0] if embeddings else "embed_tokens"
    return {
        f"{head}.weight": (
            ": the config ties it to the embedding (tie_word_embeddings), and the model does not: "
            f"self.{head} = self.{head}.tie_weights(self.{embedding})"
        )
        for head in heads
    }


def _near(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    # The bounds keep a damaged file with huge names, or many names, from taking minutes.
    near = difflib.get_close_matches(name[:200], list(known)[:1000], n=1, cutoff=0.8)
    return f" (near: {near[0]!r:.200})" if near else ""


def _misfit(target: Target, loaded: LoadedTensor) -> str:
    """Describe a tensor with a wrong dtype or shape. The text is empty if the tensor fits.

    Parameters with a loader of their own may take any shape.
    """
    dtype = loaded.dtype
    wanted = target.tensor.dtype
    is_narrow = wanted.is_floating_point and wanted.itemsize == 1
    is_other = dtype.is_floating_point != wanted.is_floating_point
    # Rounding to 8 bits would need a scale.
    if is_narrow:
        is_other = dtype != wanted
    if is_other and not getattr(target.tensor, "converts", False):
        return (
            f"{target.source!r:.200} has {dtype}, the model has {wanted}, as its quantization says"
        )
    if _loader_of(target) is not None or target.tensor.shape == loaded.shape:
        return ""
    shape = list(loaded.shape)
    wanted_shape = list(target.tensor.shape)
    return f"{target.source!r:.200} has shape {shape}, the model has {wanted_shape}"


def _are_equal(first: LoadedTensor, second: LoadedTensor) -> bool:
    """Compare two tensors of a checkpoint, a chunk of rows at a time."""
    if tuple(first.shape) != tuple(second.shape):
        return False
    rows = first.shape[0] if len(first.shape) else 0
    if not rows:
        return _have_equal_numbers(first[...], second[...])
    numbers_of_row = torch.Size(first.shape[1:]).numel()
    step = max(1, _CHUNK // max(1, numbers_of_row))
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        if not _have_equal_numbers(first[chunk], second[chunk]):
            return False
    return True


def _have_equal_numbers(first: torch.Tensor, second: torch.Tensor) -> bool:
    # Not torch.equal: the two may have different dtypes, and NaN equals nothing.
    return torch.allclose(first.double(), second.double(), rtol=0, atol=0, equal_nan=True)


def _loader_of(target: Target) -> Callable[..., None] | None:
    loader: Callable[..., None] | None = getattr(target.tensor, "weight_loader", None)
    return loader


def _fill_all(fills: _Fills, hooks: _Hooks, progress: bool) -> list[str]:
    """Fill all targets and call the hooks of modules that are complete.

    The list ``fills`` is empty afterwards, so that it holds no weights.

    Returns:
        A line for each tensor that does not fit. After the first, no hook is called.
    """
    problems: list[str] = []
    mapped = MappedWeights()
    heap = _Heap(fills, mapped)
    groups = _by_tensor(fills)
    with _bar(progress, len(fills)) as step:
        fills.clear()
        # Taken from the end: no list holds a weight once its group is done.
        while groups:
            group = groups.pop()
            problems += _fill_group(group, mapped)
            names = [target.name for target, _ in group]
            size = sum(_bytes_of(target, loaded) for target, loaded in group)
            # The hook may release the weight.
            del group
            for name in names:
                step()
                if not problems:
                    hooks.filled(name)
            heap.filled(size)
    heap.release()
    return problems


def _by_tensor(fills: _Fills) -> list[_Fills]:
    """Return the fills of each tensor of the model, those of the last tensor first."""
    groups: dict[int, _Fills] = {}
    for fill in fills:
        target, _ = fill
        group = groups.setdefault(id(target.tensor), [])
        group.append(fill)
    return list(reversed(groups.values()))


def _fill_group(group: _Fills, mapped: MappedWeights) -> list[str]:
    """Fill one tensor of the model. The result has a line for each part that does not fit."""
    first, _ = group[0]
    tensor = first.tensor
    loader = _loader_of(first) or default_weight_loader
    # A page of a file has several of the smaller tensors.
    if tensor.nbytes >= LEAST_BYTES and is_only_copying(loader):
        # The first pass copies nothing: it only notes what the loader would copy.
        with noted_copies() as copies:
            problems = _fill_parts(group)
        if problems or mapped.take(tensor, copies):
            return problems
    return _fill_parts(group)


def _fill_parts(group: _Fills) -> list[str]:
    problems = []
    for target, loaded in group:
        problems += _fill(target, loaded)
    return problems


def _fill(target: Target, loaded: LoadedTensor) -> list[str]:
    """Hand a tensor to its loader. The result is a list of one line if the tensor does not fit."""
    loader = _loader_of(target) or default_weight_loader
    shard = () if target.shard_id is None else (target.shard_id,)
    try:
        loader(target.tensor, loaded, *shard)
    except WeightError as error:
        return [_refusal(target, loaded, error.fault)]
    # torch raises all but the first if a part does not fit.
    except (OpgraftError, ValueError, IndexError, RuntimeError) as error:
        return [_refusal(target, loaded, described(error))]
    return []


def _refusal(target: Target, loaded: LoadedTensor, reason: str) -> str:
    shape = list(target.tensor.shape)
    return f"{target.source!r:.200} of shape {list(loaded.shape)} does not fit {shape}: {reason}"


class _Heap:
    """Gives memory of plain weights back to the system once packed weights have replaced them.

    The heap would keep the memory: in gaps that the next weights do not fit into.
    """

    def __init__(self, fills: _Fills, mapped: MappedWeights) -> None:
        self._mapped = mapped
        self._kept = bool(host_state().settings().config.cpu_keep_memory)
        total = sum(_bytes_of(target, loaded) for target, loaded in fills)
        self._step = max(_LEAST_RELEASED, total // _RELEASES)
        self._bytes = 0

    def filled(self, size: int) -> None:
        """Note that a weight of so many bytes is filled."""
        self._bytes += size
        if self._bytes >= self._step:
            self.release()

    def release(self) -> None:
        self._bytes = 0
        self._mapped.forget()
        if not self._kept:
            release_free_memory()


def _bytes_of(target: Target, loaded: LoadedTensor) -> int:
    count: int = math.prod(loaded.shape)
    return count * target.tensor.itemsize


class _Hooks:
    """Calls the hook of each module once all tensors in and below the module are filled.

    Inner modules are first. A module without tensors is called with the next module above it that
    has tensors and a hook, or in the end.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._modules = dict(model.named_modules())
        self._waiting = {
            path for path, module in self._modules.items() if has_post_load_hook(module)
        }
        self._unfilled: Counter[str] = Counter()
        for name in names:
            self._unfilled.update(_paths_above(name))

    def filled(self, name: str) -> None:
        """Note that a tensor is filled, and call the hooks of modules that are complete."""
        for path in _paths_above(name):
            self._unfilled[path] -= 1
            if not self._unfilled[path] and path in self._waiting:
                self._call_below(path)

    def finish(self) -> None:
        """Call the hooks of modules that have no tensors."""
        self._call_below("")

    def _call_below(self, top: str) -> None:
        """Call the hooks of a module and of modules below that have not been called."""
        # named_modules yields outer modules first.
        for path, _ in reversed(list(self._modules[top].named_modules(prefix=top))):
            if path in self._waiting:
                self._waiting.remove(path)
                call_post_load_hook(path, self._modules[path])


def _paths_above(name: str) -> Iterator[str]:
    """Yield the paths of the modules around a tensor, the innermost first.

    ``"layers.0.norm.weight"`` yields ``"layers.0.norm"``, ``"layers.0"``, ``"layers"`` and ``""``.
    """
    while name:
        name = name.rpartition(".")[0]
        yield name


@contextmanager
def _bar(wanted: bool, total: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("loading weights"), BarColumn(), MofNCompleteColumn())
    is_hidden = not (wanted and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
