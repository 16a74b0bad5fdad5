"""A platform whose class is wrong or changes the process: told by name, and nobody else's matter."""

from __future__ import annotations

import pytest
from conftest import Site, platform_source
from opgraft import current_platform
from opgraft.platforms.cpu.platform import CpuPlatform
from opgraft.plugins import kept_properties
from opgraft.plugins.process import changes_between, look
from opgraft.plugins.remarks import PLATFORM_FINDINGS
from support.faults.planting import GOOD, answer, doctor_finds, in_time, of_brix
from support.faults.platform_rows import LATER, REFUSED
from support.faults.process_rows import IMPORTS, SET_BACK, comparing

pytestmark = pytest.mark.faults

STAY = (
    "torch._C",
    "torch.nn",
    "torch.set",
    "torch.distributed",
    "torch's ",
    "the kernel of torch's ",
)
"""Beginnings of words about functions, methods and kernels of torch, which a device may need."""

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
    with in_time(), comparing(change):
        before = look()
        assert current_platform().name == "acme"
        assert [each.what for each in changes_between(before, look())] == []
    (finding,) = PLATFORM_FINDINGS.get()
    words = SET_BACK[change].removesuffix(" while")
    assert finding.message.startswith(f"platform 'acme' of acme-dist 1.0 changed {words}")
    assert finding.message.endswith("while its class was loaded: it was set back")
    assert (finding.location or "").startswith(f"{site.folder}/acme_platform.py:")
    assert str(finding) in caplog.messages


def plant(site: Site, source: str) -> None:
    """Install a platform that is there, with this class, and a plugin in order."""
    site.platform("acme", probe="return Evidence(True, 'here')", platform=source)
    site.plugin("brix", GOOD)


@pytest.mark.parametrize("name", REFUSED)
def test_properties_that_no_platform_may_have(site, capsys, name: str) -> None:
    """The platform is left out with a finding that names the property, and nobody else is accused."""
    source, words = REFUSED[name]
    plant(site, source)
    with in_time():
        code, listed = answer(capsys, "ops", "list")
    assert (code, listed.splitlines()[0]) == (0, "platform: cpu")
    (finding,) = doctor_finds()
    assert words in finding
    assert "acme-dist 1.0" in finding
    assert of_brix()["record"] == ("activated", "applies on any", (), ())


@pytest.mark.parametrize(("name", "what"), LATER)
def test_properties_that_change_when_they_are_read_again(
    site, capsys, name: str, what: str
) -> None:
    """Each is read once: every command goes on with the first value."""
    plant(site, LATER[name, what])
    with in_time():
        assert answer(capsys, "ops", "list")[0] == 0
        code, told = answer(capsys, "ops", "explain", "RMSNorm")
    assert (code, doctor_finds()) == (0, [])
    assert "acme" in told
    assert current_platform().name == "acme"
    assert [getattr(current_platform(), name) for _ in range(3)] == [
        getattr(current_platform(), name)
    ] * 3


def test_every_property_is_checked() -> None:
    """A property that is added to platforms has a check of its value."""
    assert set(kept_properties.PROPERTIES) == kept_properties._CHECKS.keys()
