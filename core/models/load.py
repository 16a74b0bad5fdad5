"""Filling a model from the tensors of a checkpoint, each read in the parts that its parameters take."""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from opgraft.errors import CheckpointError, OpgraftError
from opgraft.models.names import IGNORED, Target, Targets, WeightsMapper, is_ignored
from opgraft.ops.weights import LoadedTensor, PostLoadHook, default_weight_loader
from opgraft.text import described
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import nn


@dataclass(frozen=True)
class Loaded:
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
) -> Loaded:
    """Fill all parameters and persistent buffers of ``model``, then let modules process them.

    The model's ``packed_modules_mapping`` (see ``HasPackedModules``) tells which layers of the checkpoint it keeps as
    one. A parameter with a ``weight_loader(parameter, loaded[, shard_id])`` takes its tensor by that; ``loaded`` is a
    ``LoadedTensor``, of which it reads the part that it keeps.

    Args:
        model: constructed, on its device, with its dtypes.
        weights: tensors by name, as ``open_weights(...).tensors`` or a dictionary of tensors.
        mapper: changes names of the checkpoint to those of the model.
        ignored: patterns of names (``*`` matches all) that the model has no use for.
        progress: show a bar on stderr if it is a terminal.

    Raises:
        CheckpointError: tensors are missing, have no place, or do not fit. The message lists all of them.
    """
    start = time.perf_counter()
    targets = Targets(model)
    plan, left, unexpected = _plan(targets, weights, mapper or WeightsMapper(), (*IGNORED, *ignored))
    missing = targets.missing([target for target, _ in plan])
    problems = [f"{name!r:.200} is missing" + _near(name, unexpected) for name in missing]
    problems += [f"{name!r:.200} has no place" + _near(name, targets.by_source) for name in unexpected]
    problems += [problem for target, loaded in plan if (problem := _misfit(target, loaded))]
    count = len(plan)
    if not problems:
        del targets  # as the plan does, it holds weights that a module may want to release once it has packed them
        hooks = _Hooks(model, [target.name for target, _ in plan])
        problems = _fill_all(plan, hooks, progress)
    if problems:
        raise CheckpointError.listing(
            f"the weights are not those of the {type(model).__name__} that the configuration describes",
            problems,
            "give the configuration and the weights of one model, or save both again",
        )
    hooks.finish()
    return Loaded(count, tuple(left), time.perf_counter() - start)


_Plan = list[tuple[Target, LoadedTensor]]


def _plan(
    targets: Targets, weights: Mapping[str, LoadedTensor], mapper: WeightsMapper, ignored: Sequence[str]
) -> tuple[_Plan, list[str], list[str]]:
    """Return which target takes which tensor, in the model's order, and the names ignored and without a place."""
    plan: _Plan = []
    left, unexpected, taken = [], [], set()
    for name, loaded in weights.items():
        mapped = mapper.map(name)
        target = targets.by_source.get(mapped) if mapped is not None else None
        if target is not None and (key := (id(target.tensor), target.shard_id)) not in taken:
            taken.add(key)
            plan.append((target, loaded))
        elif target is not None or mapped is None or is_ignored(name, ignored):
            left.append(name)  # tied parameters are one tensor, which the first name fills
        else:
            unexpected.append(name)
    order = {name: place for place, name in enumerate(targets.tensors)}
    plan.sort(key=lambda item: order[item[0].name])
    return plan, left, unexpected


def _near(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name[:200], list(known)[:1000], n=1, cutoff=0.8)
    return f" (near: {near[0]!r:.200})" if near else ""


def _misfit(target: Target, loaded: LoadedTensor) -> str:
    """Return words for a tensor of another shape, where no loader of the parameter has a say."""
    if _loader_of(target) is not None or target.tensor.shape == loaded.shape:
        return ""
    return f"{target.source!r:.200} has shape {list(loaded.shape)}, the model has {list(target.tensor.shape)}"


def _loader_of(target: Target) -> Callable[..., None] | None:
    loader: Callable[..., None] | None = getattr(target.tensor, "weight_loader", None)
    return loader


def _fill_all(plan: _Plan, hooks: _Hooks, progress: bool) -> list[str]:
    """Fill what a plan says, which is used up, and call hooks on the way; return what is wrong."""
    problems: list[str] = []
    plan.reverse()
    with _bar(progress, len(plan)) as step:
        while plan:
            target, loaded = plan.pop()
            problems += _fill(target, loaded)
            name = target.name
            del target
            step()
            if not problems:
                hooks.filled(name)
    return problems


def _fill(target: Target, loaded: LoadedTensor) -> list[str]:
    """Hand a tensor to its loader; return what is wrong with it."""
    loader = _loader_of(target) or default_weight_loader
    try:
        loader(target.tensor, loaded, *(() if target.shard_id is None else (target.shard_id,)))
    except (OpgraftError, ValueError, IndexError, RuntimeError) as error:  # of torch, where a part does not fit
        shape = f"of shape {list(loaded.shape)}"
        return [f"{target.source!r:.200} {shape} does not fit {list(target.tensor.shape)}: {described(error)}"]
    return []


class _Hooks:
    """Calls the hook of each module once all tensors at and below it are filled, the inner ones first."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._waiting = {
            path: module for path, module in reversed([*model.named_modules()]) if isinstance(module, PostLoadHook)
        }
        self._unfilled = Counter(path for name in names for path in _above(name))

    def filled(self, name: str) -> None:
        for path in _above(name):
            self._unfilled[path] -= 1
            if not self._unfilled[path] and path in self._waiting:
                self._waiting.pop(path).process_weights_after_loading()

    def finish(self) -> None:
        """Call the hooks of modules that have no tensors."""
        for module in self._waiting.values():
            module.process_weights_after_loading()
        self._waiting.clear()


def _above(name: str) -> Iterator[str]:
    """Yield the paths of the modules that have a tensor: the innermost first, the empty path of the model last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


@contextmanager
def _bar(wanted: bool, total: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("loading weights"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not (wanted and console.is_terminal)) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
