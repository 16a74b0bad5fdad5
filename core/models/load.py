"""Filling a model from the tensors of a checkpoint, each read in the parts that its parameters take."""

from __future__ import annotations

import difflib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from opgraft.base.text import described
from opgraft.errors import CheckpointError, OpgraftError, WeightError
from opgraft.machine.memory import release_free_memory
from opgraft.models.names import IGNORED, ShardId, Target, Targets, WeightsMapper, is_ignored
from opgraft.ops.embedding.vocab import ParallelLMHead, VocabParallelEmbedding
from opgraft.ops.weights import (
    LoadedTensor,
    call_post_load_hook,
    default_weight_loader,
    has_post_load_hook,
)
from opgraft.registry.state import host_state
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import nn


@dataclass(frozen=True)
class LoadReport:
    """The outcome of loading.

    Attributes:
        tensors: how many tensors of the checkpoint reached the model.
        ignored: the names of those that were left out by a pattern or a mapper, or are tied to another.
        seconds: the time that it took.
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
    """Fill all parameters and persistent buffers of ``model``, then let modules process them.

    The model's ``packed_modules_mapping`` (see ``HasPackedModules``) tells which layers of the checkpoint it keeps as
    one. A parameter with a ``weight_loader(parameter, loaded[, shard_id])`` takes its tensor by that; ``loaded`` is a
    ``LoadedTensor``, of which it reads the part that it keeps. Floating-point numbers are converted to the parameter's
    dtype unless that has 8 bits; a loader that takes other numbers sets ``converts = True`` on its parameter.

    Args:
        model: constructed, on its device, with its dtypes.
        weights: tensors by name, as ``open_weights(...).tensors`` or a dictionary of tensors.
        mapper: changes names of the checkpoint to those of the model.
        ignored: patterns of names (``*`` matches all) that the model has no use for.
        progress: show a bar on stderr if it is a terminal.

    Raises:
        CheckpointError: tensors are missing, have no place, or do not fit. The message lists all of them.
        WeightError: the hook of a module raised.
    """
    start = time.perf_counter()
    targets = Targets(model)
    plan, left, unexpected, twice = _plan(
        targets, weights, mapper or WeightsMapper(), (*IGNORED, *ignored)
    )
    missing = targets.missing([target for target, _ in plan])
    ways = _ways_to_tie(model)
    problems = [
        f"{name!r:.200} is missing" + (ways.get(name) or _near(name, unexpected))
        for name in missing
    ]
    problems += [
        f"{name!r:.200} has no place" + _near(name, targets.by_source) for name in unexpected
    ]
    problems += [problem for target, loaded in plan if (problem := _misfit(target, loaded))]
    problems += [
        f"{second!r:.200} differs from {first!r:.200}, and the model has one parameter for both"
        for first, second in twice
        if not _equal(weights[first], weights[second])
    ]
    count = len(plan)
    if not problems:
        del targets  # as the plan does, it holds weights that a module may want to release once it has packed them
        hooks = _Hooks(model, [target.name for target, _ in plan])
        problems = _fill_all(plan, hooks, progress)
    if problems:
        untied_only = len(problems) == len(ways.keys() & missing)
        raise _mismatch(model, problems, untied_only)
    hooks.finish()
    return LoadReport(count, tuple(left), time.perf_counter() - start)


_CHUNK = 1 << 20
"""Numbers of two tensors that are compared at once."""

_RELEASES = 64
"""Times that free memory is given back during one loading, each of which takes about a millisecond."""

_LEAST_RELEASED = 1 << 22
"""Bytes of weights between two of them at least."""

_Plan = list[tuple[Target, LoadedTensor]]


def _plan(
    targets: Targets,
    weights: Mapping[str, LoadedTensor],
    mapper: WeightsMapper,
    ignored: Sequence[str],
) -> tuple[_Plan, list[str], list[str], list[tuple[str, str]]]:
    """Return which target takes which tensor, in the model's order, and names: ignored, without a place, in pairs.

    The second name of a pair is for a target that the first fills already.
    """
    plan: _Plan = []
    left, unexpected, twice = [], [], []
    taken: dict[tuple[int, ShardId | None], str] = {}
    for name, loaded in weights.items():
        mapped = targets.spelled(mapper.spellings(name))
        target = targets.by_source.get(mapped) if mapped is not None else None
        if target is not None and (key := (id(target.tensor), target.shard_id)) not in taken:
            taken[key] = name
            plan.append((target, loaded))
        elif target is not None:
            left.append(name)  # tied parameters are one tensor, which the first name fills
            twice.append((taken[key], name))
        elif _is_left_out(name, mapped, targets, ignored) or _adds_nothing(
            name, mapped, loaded, targets
        ):
            left.append(name)
        else:
            unexpected.append(name)
    order = {name: place for place, name in enumerate(targets.tensors)}
    plan.sort(key=lambda item: order[item[0].name])
    return plan, left, unexpected, twice


def _is_left_out(name: str, mapped: str | None, targets: Targets, ignored: Sequence[str]) -> bool:
    """Return True for a tensor that the mapper drops, other ranks have, or a pattern names."""
    return mapped is None or targets.is_elsewhere(mapped) or is_ignored(name, ignored)


def _adds_nothing(name: str, mapped: str | None, loaded: LoadedTensor, targets: Targets) -> bool:
    """Return True for a mask, and for a bias of zeros that AutoGPTQ wrote for a layer without one."""
    if _is_mask(name, loaded):
        return True
    layer, _, last = (mapped or "").rpartition(".")
    if last != "bias" or not targets.has_layer(layer):
        return False
    return not bool(loaded[...].any())


def _is_mask(name: str, loaded: LoadedTensor) -> bool:
    """Return True for the table of a causal mask, or its large negative number, in files like GPT-2's."""
    path, _, last = name.rpartition(".")
    if not path.endswith(("attn", "attention")):
        return False
    if last == "masked_bias":
        return True
    shape = tuple(loaded.shape)
    is_square = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return last == "bias" and bool(is_square)


def _mismatch(model: nn.Module, problems: Sequence[str], untied_only: bool) -> CheckpointError:
    """Make the error that lists all problems, which may be heads that are to be tied and nothing else."""
    return CheckpointError.listing(
        f"the weights are not those of the {type(model).__name__} that the configuration describes",
        problems,
        "tie the head where the model is constructed"
        if untied_only
        else "give the configuration and the weights of one model, or save both again",
    )


def _ways_to_tie(model: nn.Module) -> dict[str, str]:
    """Return what to call, by the weight of each head that is not tied to the embedding though the config says so."""
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return {}
    layers = {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, VocabParallelEmbedding)
    }
    heads = [
        path
        for path, layer in layers.items()
        if isinstance(layer, ParallelLMHead) and not layer.tied
    ]
    embedding = next((path for path, layer in layers.items() if layer.looks_up), "embed_tokens")
    return {
        f"{head}.weight": ": the config ties it to the embedding (tie_word_embeddings), and the model does not: "
        f"self.{head} = self.{head}.tie_weights(self.{embedding})"
        for head in heads
    }


def _near(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name[:200], list(known)[:1000], n=1, cutoff=0.8)
    return f" (near: {near[0]!r:.200})" if near else ""


def _misfit(target: Target, loaded: LoadedTensor) -> str:
    """Return words for a tensor of other numbers, or of another shape where no loader of the parameter has a say."""
    dtype, wanted = loaded.dtype, target.tensor.dtype
    narrow = wanted.is_floating_point and wanted.itemsize == 1
    other = dtype != wanted if narrow else dtype.is_floating_point != wanted.is_floating_point
    if other and not getattr(target.tensor, "converts", False):
        return (
            f"{target.source!r:.200} has {dtype}, the model has {wanted}, as its quantization says"
        )
    if _loader_of(target) is not None or target.tensor.shape == loaded.shape:
        return ""
    return f"{target.source!r:.200} has shape {list(loaded.shape)}, the model has {list(target.tensor.shape)}"


def _equal(first: LoadedTensor, second: LoadedTensor) -> bool:
    """Compare two tensors of a checkpoint, a chunk of rows at a time."""
    if tuple(first.shape) != tuple(second.shape):
        return False
    rows = first.shape[0] if len(first.shape) else 0
    if not rows:
        return _same(first[...], second[...])
    step = max(1, _CHUNK // max(1, torch.Size(first.shape[1:]).numel()))
    return all(
        _same(first[start : start + step], second[start : start + step])
        for start in range(0, rows, step)
    )


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first.double(), second.double(), rtol=0, atol=0, equal_nan=True)


def _loader_of(target: Target) -> Callable[..., None] | None:
    loader: Callable[..., None] | None = getattr(target.tensor, "weight_loader", None)
    return loader


def _fill_all(plan: _Plan, hooks: _Hooks, progress: bool) -> list[str]:
    """Fill what a plan says, which is used up, and call hooks on the way; return what is wrong."""
    problems: list[str] = []
    plan.reverse()
    heap = _Heap(plan)
    with _bar(progress, len(plan)) as step:
        while plan:
            target, loaded = plan.pop()
            problems += _fill(target, loaded)
            name, size = target.name, _size(target, loaded)
            del target
            step()
            if not problems:
                hooks.filled(name)
            heap.filled(size)
    heap.release()
    return problems


def _fill(target: Target, loaded: LoadedTensor) -> list[str]:
    """Hand a tensor to its loader; return what is wrong with it."""
    loader = _loader_of(target) or default_weight_loader
    try:
        loader(target.tensor, loaded, *(() if target.shard_id is None else (target.shard_id,)))
    except WeightError as error:
        return [_refused(target, loaded, error.fault)]
    except (
        OpgraftError,
        ValueError,
        IndexError,
        RuntimeError,
    ) as error:  # of torch, where a part does not fit
        return [_refused(target, loaded, described(error))]
    return []


def _refused(target: Target, loaded: LoadedTensor, words: str) -> str:
    return f"{target.source!r:.200} of shape {list(loaded.shape)} does not fit {list(target.tensor.shape)}: {words}"


class _Heap:
    """Releases what packed weights have left free in the heap: the plain ones, in gaps that others do not fit into."""

    def __init__(self, plan: _Plan) -> None:
        self._kept = bool(host_state().settings().config.cpu_keep_memory)
        self._step = max(_LEAST_RELEASED, sum(_size(*each) for each in plan) // _RELEASES)
        self._bytes = 0

    def filled(self, size: int) -> None:
        """Note that a weight of so many bytes is filled."""
        self._bytes += size
        if self._bytes >= self._step:
            self.release()

    def release(self) -> None:
        self._bytes = 0
        if not self._kept:
            release_free_memory()


def _size(target: Target, loaded: LoadedTensor) -> int:
    count: int = math.prod(loaded.shape)
    return count * target.tensor.itemsize


class _Hooks:
    """Calls the hook of each module once all tensors at and below it are filled, the inner ones first.

    A module without tensors has its turn with the next one above it that has some and a hook, or in the end.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._modules = dict(model.named_modules())
        self._waiting = {
            path for path, module in self._modules.items() if has_post_load_hook(module)
        }
        self._unfilled = Counter(path for name in names for path in _above(name))

    def filled(self, name: str) -> None:
        for path in _above(name):
            self._unfilled[path] -= 1
            if not self._unfilled[path] and path in self._waiting:
                self._call_below(path)

    def finish(self) -> None:
        """Call the hooks of modules that have no tensors."""
        self._call_below("")

    def _call_below(self, top: str) -> None:
        """Call the hooks of a module and of those below it that wait still."""
        for path, _ in reversed(list(self._modules[top].named_modules(prefix=top))):
            if path in self._waiting:
                self._waiting.remove(path)
                call_post_load_hook(path, self._modules[path])


def _above(name: str) -> Iterator[str]:
    """Yield the paths of the modules that have a tensor: the innermost first, the empty path of the model last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


@contextmanager
def _bar(wanted: bool, total: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("loading weights"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not (wanted and console.is_terminal)
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
