"""The doctor's last result is told again for as long as nothing has changed that it depends on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import opgraft
import pytest
from conftest import Site
from opgraft import OpgraftConfig, set_config
from opgraft.cli import kept_results
from opgraft.plugins import quarantine
from opgraft.registry.decision import Provider

TRACED = (
    "import opgraft\nopen(__file__ + '.tried', 'a').write('x')\nplatforms = 'any'\n"
    "@opgraft.hookimpl\ndef opgraft_veto(): return 'an old driver'\n"
)
PROBE = "from opgraft import Device; return Evidence(True, 'here', (Device('Acme 1', driver=open('driver').read()),))"


def test_the_last_result_is_told_again(cli, site) -> None:
    """Nothing is imported for it; it has the same findings, the same exit code and the time when it was found out."""
    site.plugin("acme", TRACED)
    tried = site.folder / "acme.py.tried"
    answers = [json.loads(cli("plugins", "doctor", "--json").stdout) for _ in range(2)]
    assert tried.read_text() == "x"
    assert answers[0].pop("cached") is None
    since = answers[1].pop("cached")
    assert answers[0] == answers[1]
    told = cli("plugins", "doctor")
    assert told.returncode == 1
    assert "vetoed itself: an old driver" in told.stdout
    assert told.stdout.endswith(
        f"as of {since}, since when nothing has changed: --no-cache loads everything again\n"
    )
    assert tried.read_text() == "x"
    assert "as of" not in cli("plugins", "doctor", "--no-cache").stdout
    assert tried.read_text() == "xx"


def test_a_variable_that_a_plugin_reads_makes_another_result(cli, site) -> None:
    """What the plugin says under another value is told; another terminal is no reason to load it again."""
    site.plugin(
        "acme",
        TRACED.replace("import opgraft\n", "import opgraft, os\n").replace(
            "'an old driver'", "os.environ['ACME_MODE']"
        ),
    )
    tried = site.folder / "acme.py.tried"
    for mode, folder, loaded in (("fast", "/", "x"), ("fast", "/etc", "x"), ("slow", "/", "xx")):
        told = cli("plugins", "doctor", ACME_MODE=mode, OLDPWD=folder).stdout
        assert f"vetoed itself: {mode}" in told
        assert tried.read_text() == loaded


def test_a_failure_is_never_told_again(cli, site) -> None:
    """Its cause may be the machine, which somebody has mended meanwhile."""
    site.plugin("acme", "import libacme_of_the_system\n")
    for _ in range(2):
        answer = json.loads(cli("plugins", "doctor", "--json").stdout)
        assert answer["cached"] is None
        assert answer["findings"][0]["exit_code"] == 4


def key() -> str | None:
    """The key of a fresh process."""
    opgraft.reset()
    return kept_results.key()


def edit(site: Site) -> None:
    """Change a file, and leave its metadata as it is."""
    (site.folder / "acme_platform.py").write_text("# another one\n")


def lock(site: Site) -> None:
    (site.folder.parent / "lock.json").write_text(
        '{"schema": "opgraft.lock/2", "distributions": [ ]}\n'
    )


CHANGES: dict[str, Callable[[Site], object]] = {
    "another driver": lambda site: (site.folder.parent / "driver").write_text("acme 2.0"),
    "another installation": lambda site: (
        site.folder / "acme_dist-1.0.dist-info/RECORD"
    ).write_text("acme.py,,\n"),
    "a file that is edited": edit,
    "another plugin": lambda site: site.plugin("brix", TRACED),
    "another package": lambda site: site.install("brix", {}, ""),
    "a lockfile that is edited": lock,
    "a quarantine": lambda site: quarantine.confine(Provider("acme-dist", "1.0"), "it crashed"),
    "a variable of torch": lambda site: os.environ.update(ATEN_CPU_CAPABILITY="default"),
    "a variable of a plugin": lambda site: os.environ.update(ACME_MODE="slow"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_another_result(
    site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    """A driver, a file, a setting: each gives another key, and without a change it is the same."""
    monkeypatch.chdir(tmp_path)
    for variable in ("ATEN_CPU_CAPABILITY", "ACME_MODE"):
        monkeypatch.setenv(variable, "")
    (tmp_path / "driver").write_text("acme 1.0")
    (tmp_path / "lock.json").write_text('{"schema": "opgraft.lock/2", "distributions": []}\n')
    site.platform("acme", probe=PROBE.replace("'driver'", repr(str(tmp_path / "driver"))))
    settings = {"lockfile": "lock.json"} if "lockfile" in change else {}
    with set_config(OpgraftConfig(**settings)):
        before = key()
        assert before is not None
        assert key() == before
        CHANGES[change](site)
        after = key()
    assert after not in (before, None)


def test_every_module_of_opgraft_counts() -> None:
    """The files that a result depends on have opgraft's facade, and the modules below all folders."""
    folder = Path(opgraft.__file__).parent
    counted = {Path(name).relative_to(folder).as_posix() for name in kept_results.own_files()}
    assert {"__init__.py", "errors.py", "base/version.py", "cli/kept_results.py"} <= counted
    assert "engine/planning/splits.py" in counted


def test_a_setting_makes_another_result() -> None:
    """Its value counts, and who has set it."""
    before = key()
    with set_config(OpgraftConfig(strict=True)):
        assert key() not in (before, None)
    assert key() == before


def test_no_result_of_what_changes_without_a_trace(site) -> None:
    """An editable install, one without RECORD, settings that cannot be used: there is no key."""
    site.plugin("acme", TRACED)
    info = site.folder / "acme-1.0.dist-info"
    assert key() is not None
    (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    assert key() is None
    (info / "direct_url.json").unlink()
    (info / "RECORD").unlink()
    assert key() is None
    with set_config(OpgraftConfig(lockfile="nowhere")):
        assert key() is None


def test_the_newest_are_kept() -> None:
    """Sixteen of them, and what was kept is read as it was."""
    for number in range(20):
        kept_results.keep(f"{number}", {"number": number})
    files = list((Path(os.environ["XDG_STATE_HOME"]) / "opgraft/doctor").iterdir())
    assert len(files) == 16
    kept = kept_results.look_up("19")
    assert kept is not None
    assert kept.report == {"number": 19}


def test_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder that cannot be written to, and no home: nothing is found, and it is no error."""
    (tmp_path / "file").touch()
    for variable, value in (("XDG_STATE_HOME", str(tmp_path / "file")), ("HOME", "~")):
        monkeypatch.setenv(variable, value)
        kept_results.keep("acme", {})
        assert kept_results.look_up("acme") is None
        monkeypatch.setenv("XDG_STATE_HOME", "")
