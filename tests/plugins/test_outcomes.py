"""Findings about plugins: what is wrong, with close matches and the place in the plugin's own code."""

from __future__ import annotations

from pathlib import Path

import pytest
from opgraft import load_plugins
from opgraft.plugins.outcomes import findings_of
from opgraft.registry.finding import Finding
from opgraft.registry.state import host_state

pytestmark = pytest.mark.usefixtures("warm_children")

GOOD = """
import opgraft
from opgraft.ops import RMSNorm

platforms = "any"

class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return x * 0

@opgraft.hookimpl
def opgraft_register_ops(platform):
    RMSNorm.register_oot(AcmeRMSNorm)
"""


def findings() -> list[Finding]:
    """What is found about the plugin acme, which is loaded first."""
    load_plugins()
    return list(findings_of(host_state().plugins["acme"]))


def line_of(file: Path, text: str) -> str:
    """``file:line`` of the line that holds ``text``."""
    lines = file.read_text().splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.parametrize(
    ("stated", "near"),
    [
        ('("cpuu",)', "'cpuu', which nothing installed offers: did you mean 'cpu'"),
        ('("cpu", "cdua")', "'cdua', which nothing installed offers: did you mean 'cuda'"),
        ('["CPU"]', "'CPU', which nothing installed offers: did you mean 'cpu'"),
        ('("cpu", "rocm")', None),
        ('("cpu", "acme_npu")', None),
        ('"any"', None),
    ],
)
def test_a_misspelt_platform(site, stated: str, near: str | None) -> None:
    """A name that is nearly one of an installed platform is a finding; one of a platform for elsewhere is not."""
    site.plugin("acme", GOOD.replace('"any"', stated))
    told = [finding.message for finding in findings()]
    assert told == (
        [] if near is None else [f"plugin acme of acme 1.0 states the platform {near}?"]
    )


def test_a_plugin_for_no_platform(site) -> None:
    """A plugin whose platforms nothing installed offers is told which platforms there are."""
    site.plugin("acme", GOOD.replace('"any"', '("npu",)'))
    (finding,) = findings()
    assert "states the platforms 'npu' only, which nothing installed offers" in finding.message
    assert "name one of cpu, cuda, rocm, tpu, xpu" in finding.message


@pytest.mark.parametrize("name", ["opgraft_register_op", "opgraft_regster_ops"])
def test_a_misspelt_hook(site, name: str) -> None:
    """The error names the function's place and the hook that was meant."""
    site.plugin("acme", GOOD.replace("def opgraft_register_ops", f"def {name}"))
    (finding,) = findings()
    where = line_of(site.folder / "acme.py", f"def {name}")
    assert (
        f"{name} at {where} is marked as a hook, and there is none of that name: did you mean"
        in finding.message
    )
    assert "'opgraft_register_ops'" in finding.message
    assert finding.location == where
    assert str(finding).count(where) == 1


@pytest.mark.parametrize(
    "name", ["opgraft_regster_ops", "opgraft_register_ops", "opgrft_register_ops"]
)
def test_a_hook_without_its_mark_as_the_only_one(site, name: str) -> None:
    """The function that was meant is named with its line, misspelt or only without the decorator."""
    source = GOOD.replace("@opgraft.hookimpl\n", "").replace(
        "def opgraft_register_ops", f"def {name}"
    )
    site.plugin("acme", source)
    (finding,) = findings()
    where = line_of(site.folder / "acme.py", f"def {name}")
    assert f"{name} at {where} is never called: mark it with @opgraft.hookimpl" in finding.message
    assert ("did you mean 'opgraft_register_ops'" in finding.message) == (
        name != "opgraft_register_ops"
    )
    assert finding.location == where


@pytest.mark.parametrize(
    ("stated", "ignored"),
    [
        ('("cuda",)', True),
        ('("kiwwi",)', True),
        ('"any"', True),
        ('("kiwi",)', False),
        ("None", False),
    ],
)
def test_platforms_that_the_distribution_overrules(
    site, monkeypatch, stated: str, ignored: bool
) -> None:
    """A plugin whose distribution offers a platform applies there only: stating another one is a finding."""
    monkeypatch.setenv("OPGRAFT_PLATFORM", "kiwi")
    site.platform(
        "kiwi", probe="return Evidence(True, 'here')", plugin=GOOD.replace('"any"', stated)
    )
    load_plugins()
    told = [finding.message for finding in findings_of(host_state().plugins["kiwi"])]
    assert len(told) == ignored
    if ignored:
        assert "which is ignored: its distribution offers the platform kiwi" in told[0]


def test_an_optional_hook_of_a_newer_opgraft(site) -> None:
    """Pluggy's mark for hooks that the host may not have is heeded."""
    site.plugin(
        "acme",
        GOOD + "@opgraft.hookimpl(optionalhook=True)\ndef opgraft_of_tomorrow():\n    pass\n",
    )
    assert findings() == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import acme_driver_that_is_missing  # here", "# here"),
        ("def broken(:  # here", "# here"),
        (GOOD + "    import json\n    json.loads('{')  # here\n", "# here"),
        (GOOD.replace("AcmeRMSNorm)\n", "int)  # here\n"), "# here"),
        (GOOD + "    return 3\n", "def opgraft_register_ops"),
        (GOOD.replace('platforms = "any"', ""), None),
    ],
)
def test_the_place_of_a_failure_is_in_the_plugins_code(site, source: str, line: str | None) -> None:
    """Not in the import system, a library or opgraft, where the error was raised; none where no line is to blame."""
    site.plugin("acme", source)
    (finding,) = findings()
    assert finding.location == (line and line_of(site.folder / "acme.py", line))
    assert finding.exit_code == 4


def test_a_requirement_that_nobody_can_read(site) -> None:
    """A plugin left out for malformed metadata is a finding, as one that needs another opgraft is."""
    site.plugin("acme", GOOD, requires=["opgraft =="])
    assert "malformed" in findings()[0].message
