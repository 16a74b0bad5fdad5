"""The construction of models: one signature for all, older ones adapted, and each prefix used once."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
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
"""The parameters of older signatures that are sections of the one config."""


@contextmanager
def constructing(opgraft_config: OpgraftConfig) -> Iterator[None]:
    """Construct one model within the block: its ops are decided under ``opgraft_config``, each prefix is used once.

    A block inside of another, as for the parts of a model made of two, belongs to the same model.
    """
    with prefixes_of_one_model(), set_config(opgraft_config, origin="opgraft_config"):
        yield


def is_older(cls: type) -> bool:
    """Tell if a class has an older signature, one without ``opgraft_config``."""
    return "opgraft_config" not in _parameters(cls)


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    # Of __init__, as __new__ of an op takes whatever its replacement may take.
    return inspect.signature(cls.__init__).parameters  # type: ignore[misc]  # of a class, not of an instance


def construct(
    cls: type[_T], *, opgraft_config: OpgraftConfig, prefix: str = "", **others: Any
) -> _T:
    """Construct a model or a part of one by ``cls(opgraft_config=…, prefix=…)``, adapting an older signature.

    A class without a parameter ``opgraft_config`` is handed what its parameters name: ``prefix``, the sections
    (``cache_config`` is ``opgraft_config.cache``, and so on), and what ``others`` has, such as ``config``, the
    checkpoint's own, or ``quant_config``, what chooses the weight methods of its layers. Sections are resolved.

    Raises:
        ConstructionError: an older signature requires a parameter that none of these is.
    """
    make: Callable[..., _T] = cls
    with constructing(opgraft_config):
        if not is_older(cls):
            return make(opgraft_config=opgraft_config, prefix=prefix)
        name, parameters = cls.__qualname__, _parameters(cls)
        warnings.warn(
            f"{name} has an older constructor ({', '.join(list(parameters)[1:])}): write it as "
            f'{name}(*, opgraft_config, prefix="")',
            DeprecationWarning,
            stacklevel=2,
        )
        return make(
            **_older_arguments(name, parameters, opgraft_config, {"prefix": prefix, **others})
        )


def _older_arguments(
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    config: OpgraftConfig,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    resolved = config.resolved()
    arguments = {}
    for parameter in list(parameters.values())[1:]:  # without self
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
