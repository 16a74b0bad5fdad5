"""A plugin that replaces every class of opgraft by one that notes its calls and computes as its target does.

``SHAPES`` has the calls of constructors and methods. ``RAN`` has the instances whose kernel ran, and for a form the
instances of layers that called it. ``USED`` has the instances of other classes whose methods were called. If
``COUNTING_FILE`` is set, the process writes all three there when it ends, to a file of its own if that is a folder.
The kernel of the class ``COUNTING_FAILURE`` raises.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import opgraft
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.functional import FUNCTIONALS
from opgraft.registry.op_classes import called_methods, definer, qualified, reference_method
from opgraft.registry.recorded_calls import FUNCTIONAL
from opgraft.registry.state import host_state

platforms = "any"

Shape = tuple[int, tuple[str, ...]]
"""How many arguments a call gives by position, and which by name."""

SHAPES: dict[str, Counter[Shape]] = defaultdict(Counter)
RAN: dict[str, set[int]] = defaultdict(set)
USED: dict[str, set[int]] = defaultdict(set)

_INSIDE: list[Any] = []
"""The layers whose kernels are running, the innermost last."""

_MODULES = (
    "opgraft.ops",
    "opgraft.functional",
    "opgraft.models.build",
    "opgraft.models.families",
    "opgraft.models.through_transformers",
    "opgraft.serving.llm",
)


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    for target in host_state().registry.targets():
        if isinstance(target, type) and not inspect.isabstract(target):
            make = counting_op if issubclass(target, CustomOp) else _counting_class
            CustomOp.register_oot(make(target), name=target)


def _noted(key: str, call: Callable[..., Any], cls: str = "") -> Callable[..., Any]:
    """Return a method that notes the shape of each call, and the instance as used if its class is given."""

    @functools.wraps(call, updated=())
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        SHAPES[key][len(args), tuple(sorted(kwargs))] += 1
        if cls:
            USED[cls].add(id(self))
        result = call(self, *args, **kwargs)
        if key.endswith("ModelRunner.execute") and "COUNTING_FILE" in os.environ:
            _write(
                os.environ["COUNTING_FILE"]
            )  # a worker may end without its functions for the end
        return result

    del noting.__wrapped__  # type: ignore[attr-defined]  # its signature is its own
    return noting


def counting_op(target: Any, *, with_forms: bool = True) -> type:
    kernel = "forward_oot" if reference_method(target) == "forward_native" else "forward"
    name = f"Counting{target.__name__}"

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        target.__init__(self, *args, **kwargs)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        RAN[f"{name}.{kernel}"].add(id(self))
        if os.environ.get("COUNTING_FAILURE") == name:
            raise OSError("no device")
        _INSIDE.append(self)
        try:
            return getattr(super(made, self), kernel)(*args, **kwargs)
        finally:
            _INSIDE.pop()

    namespace = {
        "__module__": __name__,
        "__init__": _noted(f"{qualified(target)}.__init__", construct),
        kernel: _noted(f"{qualified(target)}.forward", run),
    }
    forms = [form for form in FUNCTIONALS.values() if _target_of(form.op) is target]
    if forms and with_forms and kernel == "forward_oot":
        functions = {form.name: _counting_form(form, f"{name}.{kernel}") for form in forms}
        namespace["functional_oot"] = opgraft.FunctionalKernels(functions)
    made: Any = type(target)(name, (target,), namespace)
    return made


class _Targets:
    """The targets of the present registry. Each search looks at all classes, so they are kept."""

    def __init__(self) -> None:
        self._registry: object = None
        self._found: dict[str, type | None] = {}

    def find(self, op: str) -> type | None:
        registry = host_state().registry
        if registry is not self._registry:
            self._registry = registry
            self._found = {}
        if op not in self._found:
            self._found[op] = registry.find_target(op)
        return self._found[op]


_target_of = _Targets().find


def _counting_form(form: Any, kernel: str) -> Callable[..., Any]:
    key = f"{qualified(_target_of(form.op))}.{FUNCTIONAL}.{form.name}"

    @functools.wraps(form.native)
    def run(*args: Any, **kwargs: Any) -> Any:
        SHAPES[key][len(args), tuple(sorted(kwargs))] += 1
        RAN[kernel].add(id(_INSIDE[-1]) if _INSIDE else 0)
        return form.native(*args, **kwargs)

    return run


def _counting_class(target: Any) -> type:
    made_name = f"Counting{target.__name__}"
    namespace: dict[str, Any] = {
        "__module__": __name__,
        "__init__": _noted(f"{qualified(target)}.__init__", target.__init__),
    }
    for name in called_methods(target):
        if definer(target, name) is None:
            continue
        raw = inspect.getattr_static(target, name)
        if not isinstance(raw, (staticmethod, classmethod)):
            namespace[name] = _noted(f"{qualified(target)}.{name}", raw, made_name)
    made: type = type(target)(made_name, (target,), namespace)
    return made


def _written() -> Iterator[tuple[str, Any]]:
    yield "shapes", {key: sorted(map(list, shapes)) for key, shapes in sorted(SHAPES.items())}
    yield "ran", {kernel: len(instances) for kernel, instances in sorted(RAN.items())}
    yield "used", {name: len(instances) for name, instances in sorted(USED.items())}


def _write(path: str) -> None:
    path = os.path.join(path, f"{os.getpid()}.json") if os.path.isdir(path) else path
    with open(path, "w", encoding="utf-8") as file:
        json.dump(dict(_written()), file)


if "COUNTING_FILE" in os.environ:
    atexit.register(_write, os.environ["COUNTING_FILE"])
