"""The scope in which a config holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opgraft.base.caches import Caches
from opgraft.config.files import ConfigFile, Layers
from opgraft.config.whole import OpgraftConfig
from opgraft.errors import ConfigError


class Scope:
    """An active ``set_config``: its layers above the outer scopes, and the decisions made under it.

    Attributes:
        file: the file of settings that is used instead of the environment's, where one was named.
    """

    def __init__(self, layers: Layers, file: ConfigFile | None) -> None:
        self.layers = layers
        self.file = file
        self.caches = Caches()
        self.generation = -1


CURRENT_SCOPE: ContextVar[Scope | None] = ContextVar("opgraft_scope", default=None)


@contextmanager
def set_config(
    config: OpgraftConfig, *, origin: str = "set_config", file: ConfigFile | None = None
) -> Iterator[None]:
    """Use ``config`` for what is constructed within the block, over enclosing scopes, the environment and defaults.

    A ``file`` takes the place of that of ``OPGRAFT_CONFIG``, and so stands below the environment.

    Raises:
        ConfigError: ``config`` is no ``OpgraftConfig``.
    """
    if not isinstance(config, OpgraftConfig):
        raise ConfigError(f"set_config takes an OpgraftConfig, got {type(config).__name__}")
    outer = CURRENT_SCOPE.get()
    layers = (*(outer.layers if outer else ()), (origin, config))
    token = CURRENT_SCOPE.set(Scope(layers, file or (outer.file if outer else None)))
    try:
        yield
    finally:
        CURRENT_SCOPE.reset(token)
