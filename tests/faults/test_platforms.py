"""A platform whose class changes the process: told by name, and nobody else's matter."""

from __future__ import annotations

import pytest
from conftest import platform_source
from faults.planting import in_time
from faults.process_rows import IMPORTS, SET_BACK
from opgraft import current_platform
from opgraft.platforms.cpu.platform import CpuPlatform
from opgraft.plugins.process import changes_between, look
from opgraft.state import host_state

STAY = ("torch.nn", "torch.set", "torch's ")
"""Beginnings of words about functions and methods of torch, which a device may need."""

OF_ITSELF = "opgraft.Platform.default_config = None"
"""Makes the platform itself none that can be used."""

CHANGES = [
    change
    for change, words in SET_BACK.items()
    if not words.startswith(STAY) and change != OF_ITSELF
]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, marks=[pytest.mark.faults] if number % 8 else [])
        for number, change in enumerate(CHANGES)
    ],
)
def test_platforms(
    site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What others would meet is set back, and is a finding and a warning of the platform, which is chosen."""
    monkeypatch.setenv("TAKEN", "as it was")
    source = f"{IMPORTS}{change}\n{platform_source('acme')}"
    site.platform("acme", probe="return Evidence(True, 'here')", platform=source)
    CpuPlatform()  # whose module is imported by then, as that of what may be chosen instead is
    before = look()
    with in_time():
        assert current_platform().name == "acme"
    assert [each.what for each in changes_between(before, look())] == []
    (finding,) = host_state().platform_findings
    words = SET_BACK[change].removesuffix(" while")
    assert finding.message.startswith(f"platform 'acme' of acme-dist 1.0 changed {words}")
    assert finding.message.endswith("while its class was loaded: it was set back")
    assert (finding.location or "").startswith(f"{site.folder}/acme_platform.py:")
    assert str(finding) in caplog.messages
