"""``set_config``: settings for a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opgraft.base.caches import Caches
from opgraft.config.files import ConfigFile, Layers
from opgraft.config.whole import OpgraftConfig
from opgraft.errors import ConfigError


class Scope:
    """An active ``set_config``.

    Attributes:
        layers: the layers of this scope, above those of outer scopes.
        file: a file of settings in place of the environment's file, or ``None``.
        caches: the decisions under this scope.
        generation: the generation of the host state at the last use of the caches.
    """

    def __init__(self, layers: Layers, file: ConfigFile | None) -> None:
        self.layers = layers
        self.file = file
        self.caches = Caches()
        self.generation = -1


# Threads do not see the scopes of each other, and a task starts with those of its creator.
CURRENT_SCOPE: ContextVar[Scope | None] = ContextVar("opgraft_scope", default=None)


@contextmanager
def set_config(
    config: OpgraftConfig, *, origin: str = "set_config", file: ConfigFile | None = None
) -> Iterator[None]:
    """Use ``config`` within the block, above outer scopes, the environment and defaults.

    A ``file`` takes the place of the file of ``OPGRAFT_CONFIG``, below the environment.

    Raises:
        ConfigError: ``config`` is no ``OpgraftConfig``.
    """
    if not isinstance(config, OpgraftConfig):
        raise ConfigError(f"set_config takes an OpgraftConfig, got {type(config).__name__}")
    outer = CURRENT_SCOPE.get()
    if outer is None:
        scope = Scope(((origin, config),), file)
    else:
        # A scope without a file must not hide the file of the scope around.
        scope = Scope((*outer.layers, (origin, config)), file or outer.file)
    token = CURRENT_SCOPE.set(scope)
    try:
        yield
    finally:
        CURRENT_SCOPE.reset(token)
