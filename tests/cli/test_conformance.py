"""``opgraft conformance`` and ``opgraft plugins check``: answers, evidence, interrupts and regressions."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
from pathlib import Path
from typing import Any

import click
import opgraft
import pytest
from click.testing import CliRunner
from opgraft import __version__, current_platform
from opgraft.base.installed import version_of
from opgraft.cli import evidence, plugins_show
from opgraft.cli.conformance import Run, report
from opgraft.errors import InputError
from opgraft.registry.decision import Provider
from support.warm.interpreter import process_of

PLUGIN = """
import os
import torch
from opgraft.ops import GELU
platforms = "any"

@GELU.register_oot
class AcmeGELU(GELU):
    def forward_oot(self, input):
        if input.dtype == torch.bfloat16:
            os._exit(3)
        return torch.nn.functional.gelu(input, approximate=self.approximate) * (1 + 4e-4 * (input.dim() == 3))
"""


def errors_of(answer: object, schema: str = "opgraft.conformance/1") -> list[str]:
    validator = runpy.run_path(str(Path(__file__).with_name("test_schemas.py")))["validator"]
    return [error.message for error in validator(schema).iter_errors(answer)]


def test_an_interrupted_run_is_gone_on_with(site, warm_python: str, cli, tmp_path: Path) -> None:
    """What was answered is kept, and not asked again; a check that takes the process down is a failure of its own."""
    site.plugin("acme", PLUGIN)
    file = tmp_path / "evidence.json"
    command = [warm_python, "-m", "opgraft", "conformance", "acme", "--json", str(file)]
    environ = {**os.environ, "PYTHONPATH": str(site.folder)}
    with subprocess.Popen(
        command, env=environ, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as started:
        assert started.stderr is not None
        while "gelu" not in started.stderr.readline():
            assert started.poll() is None
        os.kill(process_of(started.pid), signal.SIGINT)
        told = started.stderr.read()
    assert started.returncode == 1
    assert "questions answered; --resume with the same --json goes on" in told
    first = json.loads(file.read_text())
    assert not first["complete"]
    shown = cli("plugins", "show", "acme").stdout
    assert f"judged on this machine: {first['counts']['passed']} passed, 1 failed, " in shown
    assert ", not all asked; acme 1.0 on cpu" in shown
    loading, registration = first["outcomes"][:2]
    assert loading["check"] == "loading"
    assert (
        "AcmeGELU.forward_oot of acme 1.0 ended the process with status 3" in registration["reason"]
    )
    result = cli("conformance", "acme", "--json", str(file), "--resume")
    answer = json.loads(file.read_text())
    assert (result.returncode, errors_of(answer), answer["complete"]) == (1, [], True)
    assert answer["outcomes"][: len(first["outcomes"])] == first["outcomes"]
    by_case = {(each["check"], each["dtype"]): each for each in answer["outcomes"]}
    assert "ended the process with status 3" in by_case["values", "bfloat16"]["reason"]
    assert by_case["values", "float32"]["status"] == "failed"
    assert by_case["values", "float16"]["status"] == "passed"
    assert by_case["speed", "float32"]["speed"] > 0
    assert by_case["values", "float16"]["error"] <= 1
    assert "failed: gelu values float32: of inputs (2, 3) by" in result.stdout
    again = cli("conformance", "acme", "--json", str(file), "--resume", "--baseline", str(file))
    assert (again.returncode, json.loads(file.read_text())["regressions"]) == (0, []), again.stderr
    skips = [line for line in result.stdout.splitlines() if line.startswith("skipped: ")]
    assert any("no gradient" not in line for line in skips)
    assert len(skips) == len({line.partition(": ")[2].partition(": ")[2] for line in skips})
    compared = (
        "against the baseline: checks that passed before and do not now: 0; "
        f"failed checks that did not pass before either: {answer['counts']['failed']}"
    )
    assert " ".join(again.stdout.split()) == f"{' '.join(result.stdout.split())} {compared}"
    kept = cli("conformance", "acme", "--resume")  # which has nothing left to ask
    assert (kept.returncode, kept.stdout) == (1, result.stdout)


class Impatient(Run):
    """Is interrupted as from the keyboard at the first answer."""

    def hear(self, told: dict[str, object]) -> None:
        super().hear(told)
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(
    ("brief", "advice"),
    [
        (True, "Ctrl-C ends the run."),
        (False, "Ctrl-C ends the run, which keeps the answers so far; --resume goes on."),
    ],
)
def test_a_slow_check_is_told_without_a_switch_that_cannot_help(
    site, monkeypatch: pytest.MonkeyPatch, caplog, brief: bool, advice: str
) -> None:
    """The plugin on trial is the only one, so to disable it would leave nothing to check."""
    monkeypatch.setattr("opgraft.registry.watching.PATIENCE", 0.2)
    site.plugin("acme", f"import time\ntime.sleep(2)\nraise OSError('no device')\n{PLUGIN}")
    Run("acme", evidence.ConformanceEvidence(), None, brief=brief).judge()
    told = [said for said in caplog.messages if said.startswith("still waiting for ")]
    assert told
    assert all(said.endswith(advice) for said in told)


def test_a_plugin_that_the_lockfile_refuses(site, cli) -> None:
    """The reason names the check that asks for the plugin, not a block that the user never wrote."""
    site.plugin("acme", PLUGIN)
    assert cli("plugins", "lock").returncode == 0
    (site.folder / "acme.py").write_text("import this\n")
    told = cli("plugins", "check", "acme", OPGRAFT_LOCKFILE="opgraft.lock").stdout
    words = " ".join(told.split())
    assert "failed: (plugin) loading: the check of acme asks for plugin 'acme' of acme" in words
    assert "acme.py is not the file that RECORD lists" in words


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(
    ("brief", "advice"), [(True, "answered\n"), (False, "answered; --resume goes on\n")]
)
def test_an_interrupt_without_a_file(
    site, capsys: pytest.CaptureFixture[str], brief: bool, advice: str
) -> None:
    """What is answered is kept all the same, but for the short form, where there is no advice to go on."""
    site.plugin("acme", PLUGIN)
    with pytest.raises(click.Abort):
        Impatient("acme", evidence.ConformanceEvidence(), None, brief=brief).judge()
    assert capsys.readouterr().err.endswith(advice)


def outcome(check: str, status: str) -> dict[str, object]:
    return {
        "op": "gelu",
        "check": check,
        "dtype": None,
        "status": status,
        "reason": "so",
        "error": None,
    }


def test_regressions_are_what_passed_before() -> None:
    """A check that failed before may fail; one that passed may neither fail, nor be skipped, nor be gone."""
    before, now = evidence.ConformanceEvidence(), evidence.ConformanceEvidence()
    for check, then, today in (
        ("values", "passed", "failed"),
        ("strides", "failed", "failed"),
        ("copies", "passed", "skipped"),
        ("range", "passed", "passed"),
    ):
        before.add(outcome(check, then))
        now.add(outcome(check, today))
    before.add(outcome("state", "passed"))
    found = {each["check"]: each["status"] for each in now.regressions(before)}
    assert found == {"values": "failed", "copies": "skipped", "state": "missing"}


def test_a_failure_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """What failed before is a failure, and what passed before a regression and nothing else."""
    about = {"plugin": "acme", "provider": {"version": "1.0"}, "platform": "cpu", "device": "A CPU"}
    before, now = evidence.ConformanceEvidence(), evidence.ConformanceEvidence(about)
    for check, then in (("values", "passed"), ("strides", "failed")):
        before.add(outcome(check, then))
        now.add(outcome(check, "failed"))
    report(now, now.regressions(before))
    *told, counts, compared = capsys.readouterr().out.splitlines()
    assert (counts, compared) == (
        "acme 1.0 on cpu (A CPU): 0 passed, 2 failed, 0 skipped",
        "against the baseline: checks that passed before and do not now: 1; failed checks that did not "
        "pass before either: 1",
    )
    assert told == [
        "failed: gelu strides: so",
        "regression: gelu values passed before, now failed: so",
    ]


def test_inputs_that_were_left_out_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A passed check may have tried less than it could: a line has the number of answers and a reason."""
    about = {"plugin": "acme", "provider": {"version": "1.0"}, "platform": "cpu", "device": "A CPU"}
    found = evidence.ConformanceEvidence(about)
    for check in ("inputs", "shapes"):
        found.add(outcome(check, "passed"))
    found.add({**outcome("values", "passed"), "reason": ""})
    found.add(outcome("strides", "skipped"))
    report(found, None)
    assert capsys.readouterr().out.splitlines() == [
        "inputs left out in 2 answers, such as gelu inputs: so",
        "skipped: 1 of strides: so",
        "acme 1.0 on cpu (A CPU): 3 passed, 0 failed, 1 skipped",
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        ("{", "holds no evidence that 'opgraft conformance --json' writes: JSONDecodeError"),
        (
            '{"schema": "opgraft.env/2"}',
            "its schema is 'opgraft.env/2', expected 'opgraft.conformance/1'",
        ),
    ],
)
def test_what_is_no_evidence(tmp_path: Path, content: str | None, reason: str) -> None:
    """A baseline that cannot be used is an error that names the file and why."""
    file = tmp_path / "evidence.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=reason.replace("(", "[(]")):
        evidence.read(file)


def test_evidence_of_other_versions_is_not_gone_on_with(tmp_path: Path) -> None:
    """Answers of two versions are not mixed: the error says what has changed."""
    found = evidence.ConformanceEvidence({"versions": {"torch": "2.8"}})
    with pytest.raises(InputError, match=r"versions was {'torch': '2.8'} and is {'torch': '2.9'}"):
        found.expect_same({"versions": {"torch": "2.9"}}, tmp_path / "evidence.json")


def test_the_short_form(cli, site) -> None:
    """It names op, check and numbers of what is wrong, and ends with 1; a name that nothing answers to is usage."""
    site.plugin("acme", PLUGIN.replace("os._exit(3)", "pass"))
    result = cli("plugins", "check", "acme")
    assert result.returncode == 1
    assert "failed: gelu values float32: of inputs (2, 3) by" in result.stdout
    assert "failed: gelu compilation" not in result.stdout
    assert cli("plugins", "check", "akme").returncode == 2


def test_evidence_that_cannot_be_kept(cli, site, tmp_path: Path) -> None:
    """Where the folder of states cannot be written to, a plugin is judged, and no more is said than without it."""
    site.plugin("acme", "raise OSError('no driver')\n")
    (tmp_path / "states").write_text("a file")

    def judged() -> object:
        return json.loads(cli("plugins", "show", "acme", "--json").stdout)["offers"][0]["judged"]

    result = cli("conformance", "acme", XDG_STATE_HOME=str(tmp_path / "states"))
    assert (result.returncode, "states" in result.stderr) == (1, False)
    assert "OSError: no driver" in result.stdout
    assert judged() is None
    assert cli("conformance", "acme").stdout == result.stdout
    assert judged() is not None


def outdated(changes: dict[str, Any]) -> str | None:
    """What ``plugins show`` says of evidence for the plugin acme with other values in some fields."""
    about = {
        "plugin": "acme",
        "provider": {"name": "acme", "version": "1.0"},
        "platform": "cpu",
        "device": current_platform().capability().name,
        "versions": {"opgraft": __version__, "torch": version_of("torch"), "python": "3.11.7"},
        "code": evidence.digest_of_code(Provider("acme", "1.0")),
        "brief": False,
    }
    file = evidence.kept_file("acme")
    file.parent.mkdir(parents=True, exist_ok=True)
    evidence.write(file, evidence.ConformanceEvidence({**about, **changes}, cases=0).to_dict())
    told: str | None = evidence.kept("acme", Provider("acme", "1.0"))["outdated"]
    return told


def test_evidence_of_another_subject(site) -> None:
    """Another torch, platform or device, and changed code of the same version are told."""
    files = {"acme/__init__.py": "", "acme/kernel.py": "fast = 1"}
    site.install("acme", files, {"opgraft.plugins": ["acme = acme"]})
    assert outdated({}) is None
    versions = {"opgraft": __version__, "torch": "1.0", "python": "3.11.7"}
    here = version_of("torch")
    assert outdated({"versions": versions}) == (
        f"it was made with torch 1.0, and torch {here} is installed"
    )
    assert outdated({"platform": "cuda"}) == "its platform is cuda, and the platform here is cpu"
    assert str(outdated({"device": "A GPU"})).startswith("its device is A GPU, and the device here")
    before = {"code": evidence.digest_of_code(Provider("acme", "1.0"))}
    (site.folder / "acme/kernel.py").write_text("fast = 2", encoding="utf-8")
    assert outdated(before) == "the code of acme 1.0 has changed since"


def test_code_in_all_packages_of_a_distribution_counts(site) -> None:
    """Also native code, but no other distribution in a shared package, and no file that is none."""
    npu, gpu = Provider("acme", "1.0"), Provider("acme-gpu", "1.0")
    files = {"acme_device/__init__.py": "", "vendor/npu.py": "", "vendor/fast.cc": ""}
    points = {
        "opgraft.platforms": ["acme = acme_device:SPEC"],
        "opgraft.plugins": ["acme = vendor.npu"],
    }
    site.install("acme", files, points)
    site.install("acme-gpu", {"vendor/gpu.py": ""}, {"opgraft.plugins": ["gpu = vendor.gpu"]})
    digests = [evidence.digest_of_code(npu)]
    other = evidence.digest_of_code(gpu)
    for changed in files:
        (site.folder / changed).write_text("changed = 1")
        digests.append(evidence.digest_of_code(npu))
    assert len(set(digests)) == len(digests)
    assert evidence.digest_of_code(gpu) == other
    (site.folder / "vendor/gpu.py").write_text("changed = 1")
    assert evidence.digest_of_code(npu) == digests[-1]


def test_the_code_of_an_editable_install_is_that_of_its_wheel(site) -> None:
    """What is no file is passed over."""
    acme = Provider("acme", "1.0")
    files = {"acme/__init__.py": "", "acme/inner/kernel.py": "fast = 1", "acme/notes.txt": ""}
    site.install("acme", files, {"opgraft.plugins": ["acme = acme"]})
    as_wheel = evidence.digest_of_code(acme)
    info = site.folder / "acme-1.0.dist-info"
    (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    opgraft.reset()
    assert evidence.digest_of_code(acme) == as_wheel
    (site.folder / "acme/inner/kernel.py").write_text("fast = 2")
    changed = evidence.digest_of_code(acme)
    assert changed != as_wheel
    (site.folder / "acme/folder.h").mkdir()
    os.mkfifo(site.folder / "acme/pipe.py")
    (site.folder / "acme/link.py").symlink_to("nowhere")
    assert evidence.digest_of_code(acme) == changed


def test_evidence_in_a_package_is_shown(site) -> None:
    """A summary of what was asked, of which versions and where, without importing the plugin; damage is told of."""
    about = {
        "plugin": "acme",
        "provider": {"name": "acme", "version": "1.0"},
        "platform": "cpu",
        "device": "A CPU",
    }
    versions = {"opgraft": "0.1.0", "torch": str(version_of("torch")), "python": "3.11.7"}
    found = evidence.ConformanceEvidence(
        {**about, "versions": versions, "brief": False, "date": "2026-11-24"}, cases=2
    )
    found.add(outcome("values", "passed"))
    found.add(outcome("strides", "failed"))
    files = {"acme/__init__.py": "raise ImportError('nobody asked')", "acme/plugin.py": ""}
    site.install("acme", files, {"opgraft.plugins": ["acme = acme.plugin"]})
    file = site.folder / "acme/conformance.json"
    assert evidence.shipped("acme.plugin", Provider("acme", "1.0")) is None
    evidence.write(file, found.to_dict())
    result = CliRunner().invoke(plugins_show.command, ["acme", "--json"])
    answer = json.loads(result.stdout)
    assert errors_of(answer, "opgraft.plugins.show/3") == []
    assert answer["offers"][0]["evidence"] == {
        "file": str(file),
        **{name: about[name] for name in ("provider", "platform", "device")},
        "versions": versions,
        "date": "2026-11-24",
        "complete": True,
        "counts": {"passed": 1, "failed": 1, "skipped": 0},
        "outdated": None,
        "problem": None,
    }
    text = CliRunner().invoke(plugins_show.command, ["acme"]).stdout
    torch = versions["torch"]
    told = f"acme 1.0 on cpu (A CPU), opgraft 0.1.0, torch {torch}, python 3.11.7, 2026-11-24"
    assert f"evidence: 1 passed, 1 failed, 0 skipped; {told}\n" in text
    told = "it is about acme 0.9, and acme 1.0 is installed"
    old = {**found.to_dict(), "provider": {"name": "acme", "version": "0.9"}}
    for path in (file, evidence.kept_file("acme")):
        path.parent.mkdir(parents=True, exist_ok=True)
        evidence.write(path, old)
    answer = json.loads(CliRunner().invoke(plugins_show.command, ["acme", "--json"]).stdout)
    assert errors_of(answer, "opgraft.plugins.show/3") == []
    (offer,) = answer["offers"]
    assert offer["evidence"]["outdated"] == offer["judged"]["outdated"] == told
    text = CliRunner().invoke(plugins_show.command, ["acme"]).stdout
    for words in ("evidence", "judged on this machine"):
        assert f"{words}: not of what is here ({told}): 1 passed" in text
    evidence.write(file, {**found.to_dict(), "provider": {}})
    assert "its provider has no name" in CliRunner().invoke(plugins_show.command, ["acme"]).stdout
    file.write_text("{")
    text = CliRunner().invoke(plugins_show.command, ["acme"]).stdout
    assert "conformance.json holds no evidence that" in text
