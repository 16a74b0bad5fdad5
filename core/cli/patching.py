"""Graft the models of a program that knows nothing of opgraft, as libraries build them.

No library has a hook for a model that was just built, so functions that build models are wrapped.
A library is patched when the program imports it, and stays patched until the process ends.
Processes that the program starts are not patched.

Nothing here raises an error into the program, or imports torch before the program builds a model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

from opgraft.base.text import described

BUILDERS = MappingProxyType(
    {
        # sentence-transformers, PEFT and the trainers build their models by these functions.
        "transformers.modeling_utils": (
            "PreTrainedModel.from_pretrained",
            "PreTrainedModel._from_config",
        ),
        "diffusers.models.modeling_utils": ("ModelMixin.from_pretrained",),
        "timm.models._factory": ("create_model",),
    }
)
"""Module → the functions that build models. The outermost call hands out the model."""

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
    report: Any
    reason: str = ""

    def __str__(self) -> str:
        told = self.report.tables() if self.report else f"left alone: {self.reason}"
        return f"{self.name} of {self.builder}: {told}"


@dataclass
class Grafting(MetaPathFinder):
    """Grafts the models of a program, from ``install`` on.

    Attributes:
        patches: the wrapped functions.
        missing: the functions of ``BUILDERS`` that an imported library lacks.
        models: the models so far.
    """

    patches: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    models: list[BuiltModel] = field(default_factory=list)

    def install(self) -> None:
        """Patch each library that is imported, and each other one when it is imported."""
        for name in BUILDERS.keys() & sys.modules.keys():
            self._patch_all(sys.modules[name])
        # First, as the usual finder would answer before a later one is asked.
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of ``BUILDERS``, which will be patched."""
        if fullname not in BUILDERS:
            return None
        for finder in [*sys.meta_path]:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._patch_when_executed(fullname, spec.loader)
                return spec
        return None

    def _patch_when_executed(self, fullname: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # A loader may serve several modules, such as that of a zip file.
            if module.__name__ == fullname:
                self._patch_all(module)

        loader.exec_module = exec_module

    def _patch_all(self, module: ModuleType) -> None:
        for name in BUILDERS[module.__name__]:
            self._patch(module, name)

    def _patch(self, module: ModuleType, name: str) -> None:
        owner_name, _, attribute = name.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        builder = f"{module.__name__}.{name}"
        # Not getattr, which would bind a class method.
        found = vars(owner).get(attribute) if owner is not None else None
        if found is None:
            self.missing.append(builder)
            return
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
            model = made[0] if isinstance(made, tuple) and made else made
            self.models += _grafted(model, builder)
            return made

        return building


def _grafted(model: Any, builder: str) -> list[BuiltModel]:
    """Graft a model; return its row for the report, or nothing for another object."""
    # Only here: a program sets variables of torch before it imports torch.
    from opgraft.grafting import graft
    from torch import nn

    if not isinstance(model, nn.Module):
        return []
    report = None
    try:
        reason = _why_not_yet(model)
        if not reason:
            report = graft(model)
    # The model works as it is, so no error of a plugin or of opgraft ends the program.
    except Exception as error:
        reason = described(error)
    return [BuiltModel(type(model).__qualname__, builder, report, reason)]


def _why_not_yet(model: Any) -> str:
    """Return the reason why a model cannot be grafted yet; empty if it can."""
    if any(x.is_meta for x in model.parameters()):
        return "parameters have no values yet"
    # Hooks of accelerate replace forward on the instance, and move weights at each call.
    if any("_hf_hook" in vars(module) for module in model.modules()):
        return "accelerate moves its weights between devices"
    return ""
