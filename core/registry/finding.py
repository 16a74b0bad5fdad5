"""Findings of ``opgraft plugins doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opgraft.registry.decision import Provider


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        message: the fault, the reason and the next step.
        provider: the distribution with the fault, if known.
        location: ``file:line`` of the fault, if known.
        exit_code: the exit code of a command with this finding as the worst.
        others: further distributions, as in a conflict; not part of the plain data.
    """

    message: str
    provider: Provider | None = None
    location: str | None = None
    exit_code: int = 1
    others: tuple[Provider, ...] = ()

    def __str__(self) -> str:
        # Many messages name the place within a sentence. Once is enough.
        if self.location is None or self.location in self.message:
            return self.message
        return f"{self.message} ({self.location})"

    def concerns(self, providers: Iterable[Provider]) -> bool:
        """Return True if the finding is about one of the providers."""
        return not {self.provider, *self.others}.isdisjoint(providers)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """Undo ``to_dict``."""
        provider = Provider(**data["provider"]) if data["provider"] else None
        return cls(**{**data, "provider": provider})

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain data, with the names of all JSON of opgraft."""
        return {
            "message": self.message,
            "provider": self.provider.to_dict() if self.provider else None,
            "location": self.location,
            "exit_code": self.exit_code,
        }
