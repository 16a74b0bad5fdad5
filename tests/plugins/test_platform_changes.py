"""Changes that the code of a platform makes to the process: set back, taken back where it fails, or named."""

from __future__ import annotations

import json
import os

import pytest
import torch
from conftest import platform_source
from opgraft import current_platform, load_plugins
from opgraft.errors import PlatformError
from opgraft.plugins.process import changes_between, look
from opgraft.plugins.remarks import PLATFORM_FINDINGS, PLATFORM_NOTES
from support.faults.process_rows import IMPORTS

pytestmark = pytest.mark.usefixtures("warm_children")

AVAILABLE = "return Evidence(True, 'here')"


def source(change: str = "", methods: str = "") -> str:
    """A platform that makes a change when its module is imported, and has further methods."""
    return f"{IMPORTS}{change}\n{platform_source('acme')}{methods}"


def test_what_a_device_needs_of_torch_stays_and_is_named(
    site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do variables of its own: they are no finding, as nobody but the device runs in the process."""
    for owner, name in ((torch.nn.functional, "silu"), (torch, "set_default_dtype")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.delenv("ACME_ASYNC", raising=False)
    changes = "torch.nn.functional.silu = torch.relu\nos.environ['ACME_ASYNC'] = '1'\n"
    site.platform("acme", probe=AVAILABLE, platform=source(changes))
    load_plugins()
    assert torch.nn.functional.silu is torch.relu
    assert os.environ.pop("ACME_ASYNC") == "1"
    assert PLATFORM_FINDINGS.get() == []
    assert [note for _, note in PLATFORM_NOTES.get()] == [
        f"platform 'acme' of acme-dist 1.0 changed {what} while its class was loaded: it stays"
        for what in ("the environment variable ACME_ASYNC (new)", "torch.nn.functional.silu")
    ]


@pytest.mark.parametrize("fault", ["raise OSError('no driver')", "Device = dict"])
def test_a_class_that_cannot_be_used_leaves_nothing(site, fault: str) -> None:
    """Another platform is chosen, and computes as if this one had not been there; its own methods too."""
    changes = "\n".join(
        (
            "torch.nn.functional.silu = torch.relu",
            "torch.set_default_dtype(torch.float64)",
            "CpuPlatform.memory = lambda *_: None",
            "os.environ['ACME_ASYNC'] = '1'",
        )
    )
    site.platform("acme", probe=AVAILABLE, platform=f"{source(changes)}\n{fault}\n")
    before = look()
    assert current_platform().name == "cpu"
    assert [each.what for each in changes_between(before, look())] == []
    assert current_platform().memory().total > 0
    told = [finding.message for finding in PLATFORM_FINDINGS.get()]
    assert len([message for message in told if message.endswith("it was set back")]) == 4
    assert "cannot be used" in told[-1]
    assert PLATFORM_NOTES.get() == []


PREPARES = (
    "    def prepare(self, config):\n        torch.backends.mkldnn.enabled = False\n        {}\n"
)


def test_what_it_sets_up_for_the_process_stays_and_is_named(
    site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method ``prepare`` is for that; where it raises nothing is left of it."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    site.platform("acme", probe=AVAILABLE, platform=source(methods=PREPARES.format("pass")))
    load_plugins()
    assert torch.backends.mkldnn.enabled is False
    (note,) = (note for _, note in PLATFORM_NOTES.get())
    assert note.endswith(
        "changed torch.backends.mkldnn.enabled from True to False in its method prepare: it stays"
    )


def test_a_setup_that_raises_leaves_nothing(site) -> None:
    """What it had changed by then is set back, which is told with its place."""
    site.platform("acme", probe=AVAILABLE, platform=source(methods=PREPARES.format("1 / 0")))
    with pytest.raises(
        PlatformError,
        match=r"platform 'acme' of acme-dist 1\.0 cannot be set up: .*ZeroDivisionError",
    ):
        load_plugins()
    assert torch.backends.mkldnn.enabled is True
    (finding,) = PLATFORM_FINDINGS.get()
    assert (
        "mkldnn.enabled from True to False in its method prepare: it was set back"
        in finding.message
    )
    assert f"{site.folder}/acme_platform.py:" in str(finding)


def test_the_doctor_tells(cli, site) -> None:
    """Findings and notes stand in its report, with the exit code of findings."""
    changes = "torch.set_default_dtype(torch.float64)\nos.environ['ACME_ASYNC'] = '1'\n"
    site.platform("acme", probe=AVAILABLE, platform=source(changes))
    told = cli("plugins", "doctor", "--json")
    report = json.loads(told.stdout)
    (finding,) = report["findings"]
    assert (told.returncode, finding["provider"]["name"]) == (1, "acme-dist")
    assert "changed the default dtype from torch.float32 to torch.float64" in finding["message"]
    (note,) = report["notes"]
    assert (
        "changed the environment variable ACME_ASYNC (new) while its class was loaded: it stays"
        in note["reason"]
    )
