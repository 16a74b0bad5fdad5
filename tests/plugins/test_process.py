"""Changes that plugins make to the process: found, set back where they would meet others, and told by the doctor."""

from __future__ import annotations

import builtins
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import load_plugins
from opgraft.decision import Provider
from opgraft.plugins.outcomes import findings_of
from opgraft.plugins.process import ASPECTS, look
from opgraft.state import PluginRecord, PluginStatus, host_state

PLUGIN = "\nplatforms = 'any'\nimport opgraft\n@opgraft.hookimpl\ndef opgraft_veto(): {}\n"

SET_BACK = {
    "torch.set_default_dtype(torch.float64)": "the default dtype from torch.float32 to torch.float64",
    "torch.set_default_device('meta')": "the default device from cpu to meta",
    "torch.set_num_threads(torch.get_num_threads() + 1)": "the number of threads from ",
    "torch.set_grad_enabled(False)": "whether gradients are recorded from True to False",
    "torch.use_deterministic_algorithms(True)": "whether algorithms are deterministic from (False, False) to (True,",
    "torch.set_float32_matmul_precision('medium')": "the precision of products from highest to medium",
    "sys.setrecursionlimit(9999)": "the recursion limit from ",
    "os.chdir('/')": "the working folder from ",
    "locale.setlocale(locale.LC_NUMERIC, 'C.UTF-8')": "the locale from ",
    "sys.stdout = io.StringIO()": "sys.stdout from ",
    "sys.stdin = None": "sys.stdin from ",
    "os.environ['TAKEN'] = 'changed'": "the environment variable TAKEN while",
    "del os.environ['TAKEN']": "the environment variable TAKEN while",
    "builtins.ascii = lambda x: x": "builtins ascii while",
    "sys.modules['json'] = sys": "the module json while",
    "del sys.modules['json']": "the module json while",
    "sys.path.reverse()": "the order of sys.path while",
    "sys.path.clear()": "the order of sys.path while",
    "sys.meta_path.insert(0, sys.meta_path[-1])": "the order of sys.meta_path while",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)": "the handler of SIGTERM while",
    "signal.signal(signal.SIGINT, lambda *_: None)": "the handler of SIGINT while",
    "warnings.simplefilter('ignore')": "the filters of warnings while",
    "warnings.resetwarnings()": "the filters of warnings while",
    "logging.disable(50)": "the loggers of everybody while",
    "logging.getLogger().setLevel(50)": "the loggers of everybody while",
    "logging.getLogger('opgraft').disabled = True": "the loggers of everybody while",
}
"""Source of a plugin, and what is said of it; each is set back."""

IMPORTS = "import builtins, io, locale, logging, os, signal, sys, torch, warnings\n"


def states() -> list[Any]:
    """The process, as far as two looks at it can be compared; what new imports bring is no change."""
    return [value for aspect, value in zip(ASPECTS, look(), strict=True) if getattr(aspect, "name", "") != "the module"]


@pytest.fixture(autouse=True)
def a_variable_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKEN", "as it was")


@pytest.mark.parametrize("where", ["while it was loaded", "in its hook opgraft_veto"])
@pytest.mark.parametrize("change", SET_BACK)
def test_a_change_that_meets_others_is_set_back(site, caplog, change: str, where: str) -> None:
    """It is a finding and a warning of the plugin that made it, which stays, and nobody else sees it."""
    at_import = where == "while it was loaded"
    site.plugin("acme", IMPORTS + (change if at_import else "") + PLUGIN.format("pass" if at_import else change))
    site.plugin("brix", PLUGIN.format("pass"))
    before, words = states(), SET_BACK[change].removesuffix("while")
    json_module = sys.modules["json"]
    load_plugins()
    assert states() == before
    assert sys.modules["json"] is json_module
    acme, brix = host_state().plugins["acme"], host_state().plugins["brix"]
    assert [record.status.value for record in (acme, brix)] == ["activated", "activated"]
    (finding,) = acme.findings
    assert finding.startswith(f"changed {words}")
    assert finding.endswith(f"{where}: it was set back")
    assert (brix.findings, brix.notes, acme.notes) == ((), (), ())
    assert f"plugin 'acme' of acme 1.0 {finding}" in caplog.messages


ADDED = {
    "os.environ['ACME'] = '1'": ("the environment variable ACME (new)", lambda: "ACME" in os.environ),
    "builtins.acme = 1": ("builtins acme (new)", lambda: hasattr(builtins, "acme")),
    "sys.path.append('/acme')": ("sys.path /acme (new)", lambda: "/acme" in sys.path),
    "sys.meta_path.append(type('Finder', (), {}))": (
        "sys.meta_path <class 'acme.Finder'> (new)",
        lambda: "acme.Finder" in str(sys.meta_path),
    ),
}

VERDICTS = {
    "activated": PLUGIN.format("pass"),
    "failed": PLUGIN.format("1 / 0"),
    "vetoed": PLUGIN.format("return 'an old driver'"),
    "rejected": PLUGIN.format("pass").replace("'any'", "('cuda',)"),
}


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("addition", ADDED)
def test_what_a_plugin_adds_stays_as_long_as_it_does(site, caplog, addition: str, verdict: str) -> None:
    """It is a note, no finding; a plugin that is not used after all leaves nothing of it."""
    site.plugin("acme", IMPORTS + addition + VERDICTS[verdict])
    words, there = ADDED[addition]
    path, finders = list(sys.path), list(sys.meta_path)
    try:
        load_plugins()
        record = host_state().plugins["acme"]
        assert record.notes == (f"changed {words} while it was loaded: it stays as long as the plugin does",)
        assert (record.findings, record.status.value) == ((), verdict)
        assert there() is (verdict == "activated")
        assert not [line for line in caplog.messages if "changed" in line]
    finally:
        os.environ.pop("ACME", None)
        vars(builtins).pop("acme", None)
        sys.path[:], sys.meta_path[:] = path, finders


def test_what_a_veto_changes_itself(site) -> None:
    """It goes with the plugin, too."""
    site.plugin("acme", IMPORTS + PLUGIN.format("os.environ['ACME'] = '1'; return 'an old driver'"))
    try:
        load_plugins()
        record = host_state().plugins["acme"]
        assert (record.findings, record.status.value, record.reason) == ((), "vetoed", "an old driver")
        assert "ACME" not in os.environ
    finally:
        os.environ.pop("ACME", None)


def test_what_is_no_change_of_others(site) -> None:
    """For certain warnings, for its own loggers: nothing is said."""
    own = (
        "class AcmeWarning(UserWarning): pass\n"
        "warnings.filterwarnings('ignore', message='acme is slow')\nwarnings.simplefilter('always', AcmeWarning)\n"
        "logging.getLogger('acme').setLevel(10)\n"
    )
    site.plugin("acme", IMPORTS + own + PLUGIN.format("pass"))
    load_plugins()
    record = host_state().plugins["acme"]
    assert (record.findings, record.notes, record.status.value) == ((), (), "activated")


def test_what_a_plugin_puts_in_front_goes_behind(site) -> None:
    """It is found there as before, and takes nobody's place."""
    site.plugin("acme", IMPORTS + "sys.path.insert(0, '/acme')" + PLUGIN.format("pass"))
    path = list(sys.path)
    try:
        load_plugins()
        assert sys.path == [*path, "/acme"]
        assert host_state().plugins["acme"].findings == (
            "changed the order of sys.path while it was loaded: it was set back",
        )
    finally:
        sys.path[:] = path


def test_a_plugin_that_fails_is_set_back_too(site) -> None:
    """What it changed before it raised does not outlive it."""
    site.plugin("acme", f"{IMPORTS}torch.set_default_dtype(torch.float64)\nraise OSError('no driver')\n")
    load_plugins()
    assert torch.get_default_dtype() is torch.float32
    assert host_state().plugins["acme"].status.value == "failed"
    assert len(host_state().plugins["acme"].findings) == 1


def test_what_cannot_be_set_back_is_named(site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's reason is told."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    site.plugin("acme", f"{IMPORTS}os.chdir('/'); os.rmdir({str(gone)!r})" + PLUGIN.format("pass"))
    load_plugins()
    (finding,) = host_state().plugins["acme"].findings
    assert f"from {gone} to / while it was loaded: it cannot be set back: FileNotFoundError" in finding
    monkeypatch.chdir(tmp_path)


def test_the_doctor_tells(cli, site) -> None:
    """A finding for what was set back, with exit code 1, and a note for what stays; the seconds of each import."""
    site.plugin("acme", IMPORTS + "torch.set_default_dtype(torch.float64)" + PLUGIN.format("pass"))
    site.plugin("brix", IMPORTS + "os.environ['BRIX'] = '1'" + PLUGIN.format("pass"))
    result = cli("plugins", "doctor", "--json")
    answer = json.loads(result.stdout)
    assert result.returncode == 1
    (finding,) = answer["findings"]
    said = "plugin acme of acme 1.0 changed the default dtype from torch.float32 to torch.float64 while it was loaded"
    assert finding["message"] == f"{said}: it was set back"
    (note,) = answer["notes"]
    assert note["reason"].startswith("plugin brix changed the environment variable BRIX (new) while it was loaded")
    assert all(0 <= row["seconds"] < 60 for row in answer["plugins"])


def test_a_slow_import_is_a_finding() -> None:
    """From five seconds on, whatever became of the plugin."""
    record = PluginRecord("acme", "acme", Provider("acme", "1.0"), PluginStatus.ACTIVATED, seconds=5.04)
    assert [finding.message for finding in findings_of(record)] == [
        "plugin acme of acme 1.0 took 5.0 s to import, and each process that constructs an op waits for it"
    ]
    record.seconds = 4.9
    assert list(findings_of(record)) == []
