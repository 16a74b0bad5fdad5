"""Graft the models of a program that knows nothing of opgraft, as libraries build them.

No library has a hook for a model that was just built, so functions that build models are wrapped.
A library is patched when the program imports it. A process that the program starts is not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

from opgraft.errors import OpgraftError
from opgraft.grafting.replace import graft
from opgraft.grafting.report import GraftReport
from torch import nn

BUILDERS = MappingProxyType(
    {
        # For sentence-transformers, PEFT and the trainers, too, which build their models by it.
        "transformers.modeling_utils": (
            "PreTrainedModel.from_pretrained",
            "PreTrainedModel._from_config",
        ),
        "diffusers.models.modeling_utils": ("ModelMixin.from_pretrained",),
        "timm.models._factory": ("create_model",),
    }
)
"""Module → the functions that build models. The last call that returns hands out the model."""

_is_building: ContextVar[bool] = ContextVar("_is_building", default=False)


@dataclass(frozen=True)
class BuiltModel:
    """A model that a program has built.

    Attributes:
        name: of the class.
        builder: the function that has built the model.
        report: of the graft; ``None`` if the model stays as it is.
        reason: why the model stays as it is; empty if it was grafted.
    """

    name: str
    builder: str
    report: GraftReport | None
    reason: str = ""

    def __str__(self) -> str:
        told = self.report.tables() if self.report else f"left alone: {self.reason}"
        return f"{self.name} of {self.builder}: {told}"


@dataclass
class Grafting(MetaPathFinder):
    """Grafts the models of a program, from ``installed`` on.

    Attributes:
        patches: the wrapped functions.
        models: the models so far.
    """

    patches: list[str] = field(default_factory=list)
    models: list[BuiltModel] = field(default_factory=list)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Patch each library, when it is imported within the block if it was not before."""
        for name in BUILDERS.keys() & sys.modules.keys():
            self._patch_all(sys.modules[name])
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of ``BUILDERS``, which will be patched."""
        if fullname not in BUILDERS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._patch_when_executed(spec.loader)
                return spec
        return None

    def _patch_when_executed(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._patch_all(module)

        loader.exec_module = exec_module

    def _patch_all(self, module: ModuleType) -> None:
        for name in BUILDERS[module.__name__]:
            self._patch(module, name)

    def _patch(self, module: ModuleType, name: str) -> None:
        owner_name, _, attribute = name.rpartition(".")
        owner = getattr(module, owner_name) if owner_name else module
        builder = f"{module.__name__}.{name}"
        found = vars(owner)[attribute]
        if isinstance(found, classmethod):
            wrapped: Any = classmethod(self._wrapped(found.__func__, builder))
        else:
            wrapped = self._wrapped(found, builder)
        setattr(owner, attribute, wrapped)
        self.patches.append(builder)

    def _wrapped(self, build: Callable[..., Any], builder: str) -> Callable[..., Any]:
        @functools.wraps(build)
        def building(*args: Any, **kwargs: Any) -> Any:
            # A model that is built for another one is grafted with that one.
            if _is_building.get():
                return build(*args, **kwargs)
            token = _is_building.set(True)
            try:
                made = build(*args, **kwargs)
            finally:
                _is_building.reset(token)
            # With output_loading_info, transformers returns a pair.
            model = made[0] if isinstance(made, tuple) else made
            if isinstance(model, nn.Module):
                self._graft(model, builder)
            return made

        return building

    def _graft(self, model: nn.Module, builder: str) -> None:
        reason = _obstacle(model)
        report = None
        if not reason:
            try:
                report = graft(model)
            except OpgraftError as error:
                reason = str(error)
        self.models.append(BuiltModel(type(model).__qualname__, builder, report, reason))


def _obstacle(model: nn.Module) -> str:
    """Return the reason why a model cannot be grafted yet; empty if it can."""
    if any(x.is_meta for x in model.parameters()):
        return "parameters have no values yet"
    # Hooks of accelerate replace forward on the instance, and move weights at each call.
    if any("_hf_hook" in vars(module) for module in model.modules()):
        return "accelerate moves its weights between devices"
    return ""
