"""Decisions that explain themselves.

Choosing a platform, a plugin or a kernel yields one ``Decision``: every candidate, accepted or rejected, with the
reason, the evidence and the provider, and the setting that would change the outcome. The same object is the Python
API, the text of errors, the ``--json`` output and the bug report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from opgraft.base.text import html_table, html_text, printable
from opgraft.machine.evidence import Evidence

NOT_PROBED = "not probed: "
"""The beginning of the reason of a candidate that nothing was asked of, as a setting asks for another one."""


@dataclass(frozen=True)
class Provider:
    """The provider of something: a distribution and its version, or a module where no distribution is known."""

    name: str
    version: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version}

    def attributes(self) -> dict[str, str]:
        """Return attributes of what is logged about it; there is no version where none is known."""
        found = {"opgraft.provider.name": printable(self.name)}
        return (
            found
            if self.version is None
            else {**found, "opgraft.provider.version": printable(self.version)}
        )

    def __str__(self) -> str:
        return printable(f"{self.name} {self.version}" if self.version else self.name)


@dataclass(frozen=True)
class Candidate:
    """One option that was considered: ``location`` is ``file:line``, ``evidence`` what its probe found."""

    name: str
    accepted: bool
    reason: str
    provider: Provider | None = None
    location: str | None = None
    evidence: Evidence | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "accepted": self.accepted,
            "reason": self.reason,
            "provider": self.provider.to_dict() if self.provider else None,
            "location": self.location,
            "evidence": self.evidence.to_dict() if self.evidence else None,
        }


@dataclass(frozen=True)
class Decision:
    """The choice made for ``subject``: why, from which candidates, and which ``setting`` would change it.

    ``chosen`` is ``None`` where nothing could be chosen. ``parts`` are decisions that this one rests on, such as the
    choice of a replacement class within the choice of a kernel.
    """

    subject: str
    chosen: str | None
    reason: str
    candidates: tuple[Candidate, ...] = ()
    setting: str = ""
    parts: tuple[Decision, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain data, ready for ``json.dumps``."""
        return {
            "subject": self.subject,
            "chosen": self.chosen,
            "reason": self.reason,
            "setting": self.setting,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "parts": [part.to_dict() for part in self.parts],
        }

    def summary(self) -> str:
        """Return the decision in one line."""
        return printable(f"{self.subject}: {self.chosen or 'none'} ({self.reason})")

    def attributes(self) -> dict[str, str]:
        """Return attributes of the line that logs the decision."""
        parts = {"subject": self.subject, "chosen": self.chosen or "", "reason": self.reason}
        return {f"opgraft.decision.{name}": printable(text) for name, text in parts.items()}

    def lines(self) -> Iterator[str]:
        """Yield the decision in words, a line per candidate and per observation.

        Of the decisions that this one rests on, candidates that nothing was asked of are left out.
        """
        yield from self._lines(self.candidates)

    def _lines(self, candidates: Iterable[Candidate]) -> Iterator[str]:
        yield self.summary()
        for candidate in candidates:
            mark = "+" if candidate.accepted else "-"
            by = f" [{candidate.provider}]" if candidate.provider else ""
            at = f" at {candidate.location}" if candidate.location else ""
            yield printable(f"  {mark} {candidate.name}{by}{at}: {candidate.reason}")
            yield from (
                f"      {line}"
                for line in (candidate.evidence.lines() if candidate.evidence else ())
            )
        if self.setting:
            yield printable(f"  to change it: {self.setting}")
        for part in self.parts:
            asked = [
                candidate
                for candidate in part.candidates
                if not candidate.reason.startswith(NOT_PROBED)
            ]
            yield from (f"  {line}" for line in part._lines(asked))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<Decision {self.summary()}; {len(self.candidates)} candidates>"

    def _repr_html_(self) -> str:
        """Return the decision for a notebook: its candidates as a table, and the decisions that it rests on."""
        rows = [
            ("chosen" if row.accepted else "", row.name, row.provider or "", row.reason)
            for row in self.candidates
        ]
        shown = [html_text(self.summary())]
        if rows:
            shown.append(html_table([("", "candidate", "provider", "reason"), *rows]))
        if self.setting:
            shown.append(html_text(f"to change it: {self.setting}"))
        return "".join([*shown, *(part._repr_html_() for part in self.parts)])
