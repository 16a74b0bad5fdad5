"""Remarks on the code of others during the load, for commands to show."""

from __future__ import annotations

from opgraft.registry.decision import Provider
from opgraft.registry.finding import Finding
from opgraft.registry.state import StateValue

PLATFORM_FINDINGS = StateValue[list[Finding]](list)
"""Faults of platforms that should have worked, and changes of the process by others."""

PLATFORM_NOTES = StateValue[list[tuple[Provider, str]]](list)
"""Changes of the process by the platform, which stay, in words."""

STARTED = StateValue[dict[object, Provider]](dict)
"""Threads and processes that plugins have started while loaded, and that keep a process open."""
