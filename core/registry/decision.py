"""``Decision``, the record of a choice.

Choosing a platform, a plugin or a kernel yields one ``Decision``: every candidate, accepted or
rejected, with reason, evidence and provider, and the setting to change the outcome. The same object
is the Python API, the text of errors, the ``--json`` output and the bug report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from opgraft.base.text import html_table, html_text, printable
from opgraft.machine.evidence import Evidence

NOT_PROBED = "not probed: "
"""The beginning of a candidate's reason, if a setting has chosen another one without a probe."""


@dataclass(frozen=True)
class Provider:
    """The provider of a class or plugin: a distribution with a version.

    A module without a distribution is its own provider, without a version.
    """

    name: str
    version: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version}

    def attributes(self) -> dict[str, str]:
        """Return attributes for log lines about the provider, without an unknown version."""
        found = {"opgraft.provider.name": printable(self.name)}
        if self.version is not None:
            found["opgraft.provider.version"] = printable(self.version)
        return found

    def __str__(self) -> str:
        return printable(f"{self.name} {self.version}" if self.version else self.name)


@dataclass(frozen=True)
class Candidate:
    """One option of a choice.

    Attributes:
        name: the option, such as a class or platform.
        accepted: the option was chosen.
        reason: why the option was chosen, or not.
        provider: the provider of the option, if known.
        location: ``file:line`` of the option, if known.
        evidence: the findings of the platform's probe.
    """

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
    """The record of one choice.

    Attributes:
        subject: the question, such as ``kernel of rms_norm``.
        chosen: the chosen candidate, or ``None``.
        reason: the reason for the choice.
        candidates: all options.
        setting: the setting to change the choice, in words; empty if none does.
        parts: decisions below this one, such as the choice of the class below the choice of a
            kernel.
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
        """Return attributes for log lines about the decision."""
        parts = {"subject": self.subject, "chosen": self.chosen or "", "reason": self.reason}
        return {f"opgraft.decision.{name}": printable(text) for name, text in parts.items()}

    def lines(self) -> Iterator[str]:
        """Yield the decision in words, a line per candidate and per observation.

        The decisions in ``parts`` follow, without candidates that were not probed.
        """
        yield from self._lines(self.candidates)

    def _lines(self, candidates: Iterable[Candidate]) -> Iterator[str]:
        yield self.summary()
        for candidate in candidates:
            mark = "+" if candidate.accepted else "-"
            by = f" [{candidate.provider}]" if candidate.provider else ""
            at = f" at {candidate.location}" if candidate.location else ""
            yield printable(f"  {mark} {candidate.name}{by}{at}: {candidate.reason}")
            if candidate.evidence:
                for line in candidate.evidence.lines():
                    yield f"      {line}"
        if self.setting:
            yield printable(f"  to change it: {self.setting}")
        for part in self.parts:
            # Below another decision, a list of platforms without a finding would only distract.
            asked = [row for row in part.candidates if not row.reason.startswith(NOT_PROBED)]
            for line in part._lines(asked):
                yield f"  {line}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<Decision {self.summary()}; {len(self.candidates)} candidates>"

    def _repr_html_(self) -> str:
        """Return the decision for a notebook: a table of the candidates, then the parts."""
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
