"""``Proposer``: guesses the next tokens of a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.engine.request import Request


@PluggableClass.register("proposer")
class Proposer(PluggableClass, ABC):
    """Guesses the next tokens of requests. A wrong guess costs time, and changes no token.

    ``speculation.method`` chooses one of opgraft's proposers. If any method is chosen, the proposer
    of a plugin replaces all of them. After an exception, the proposer is not asked again.

    Each rank of a launcher has a proposer, and all must guess alike: a guess may depend on requests
    and settings only.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        self.opgraft_config = opgraft_config

    @abstractmethod
    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return a guess of the next tokens of a request, at most ``most`` of them.

        The scheduler calls this before each step. New tokens are at the end of ``Request.tokens``.
        """

    @abstractmethod
    def forget(self, request: Request) -> None:
        """Release the data of an ended request. The proposer may not know the request."""

    @abstractmethod
    def forget_all(self) -> None:
        """Release the data of all requests: they start anew, and last tokens may be gone."""
