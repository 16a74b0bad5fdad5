"""The construction of models: one signature, adapters for older signatures, unique prefixes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from opgraft.config import OpgraftConfig, set_config
from opgraft.errors import ConstructionError
from opgraft.ops.prefixes import prefixes_of_one_model

_T = TypeVar("_T")

_SECTIONS: Mapping[str, Callable[[OpgraftConfig], Any]] = {
    "model_config": lambda config: config.model,
    "cache_config": lambda config: config.cache,
    "scheduler_config": lambda config: config.scheduler,
    "parallel_config": lambda config: config.parallel,
    "load_config": lambda config: config.load,
}
"""Parameters of older signatures that are sections of ``OpgraftConfig``."""


@contextmanager
def constructing(opgraft_config: OpgraftConfig) -> Iterator[None]:
    """Construct one model within the block.

    ``opgraft_config`` decides about the kernels of ops. Each prefix may be used once. Inner blocks,
    such as those for the parts of a model, belong to the model of the outer block.
    """
    with prefixes_of_one_model(), set_config(opgraft_config, origin="opgraft_config"):
        yield


def is_older(cls: type) -> bool:
    """Return True if a class has an older signature, without ``opgraft_config``."""
    return "opgraft_config" not in _parameters(cls)


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    # __new__ of an op would not tell: its arguments are those of any replacement.
    return inspect.signature(cls.__init__).parameters  # type: ignore[misc]


def construct(
    cls: type[_T], *, opgraft_config: OpgraftConfig, prefix: str = "", **others: Any
) -> _T:
    """Construct a model, or a part of a model, by ``cls(opgraft_config=…, prefix=…)``.

    A class with an older signature gets the arguments that its parameters name: ``prefix``, the
    resolved sections (``cache_config`` is ``opgraft_config.cache``, and so on), and ``others``,
    such as the checkpoint's ``config`` or the ``quant_config`` of the layers.

    Raises:
        ConstructionError: an older signature requires another parameter.
    """
    make: Callable[..., _T] = cls
    with constructing(opgraft_config):
        if not is_older(cls):
            return make(opgraft_config=opgraft_config, prefix=prefix)
        name = cls.__qualname__
        # The first parameter is self.
        parameters = list(_parameters(cls).values())[1:]
        warnings.warn(
            f"{name} has an older constructor ({', '.join(each.name for each in parameters)}): "
            f'write it as {name}(*, opgraft_config, prefix="")',
            DeprecationWarning,
            stacklevel=2,
        )
        given = {"prefix": prefix, **others}
        return make(**_older_arguments(name, parameters, opgraft_config, given))


def _older_arguments(
    name: str,
    parameters: Sequence[inspect.Parameter],
    config: OpgraftConfig,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a constructor with an older signature.

    Raises:
        ConstructionError: a required parameter is neither in ``given`` nor a section.
    """
    resolved = config.resolved()
    arguments = {}
    for parameter in parameters:
        # *args and **kwargs need nothing, and often pass unknown arguments on to a base class.
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in given:
            arguments[parameter.name] = given[parameter.name]
        elif parameter.name in _SECTIONS:
            arguments[parameter.name] = _SECTIONS[parameter.name](resolved)
        elif parameter.default is parameter.empty:
            known = ", ".join([*given, *_SECTIONS])
            raise ConstructionError(
                f"{name} requires the parameter {parameter.name!r}, which is none of {known}: "
                f'write it as {name}(*, opgraft_config, prefix="")'
            )
    return arguments
