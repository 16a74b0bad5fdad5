"""'opgraft plugins lock' as users run it, and what other commands then say."""

from __future__ import annotations

import json
import shutil

PLANTED = "open(__file__ + '.imported', 'w').close()\n"


def test_what_cannot_be_locked_is_told_escaped_and_imported_by_nothing(cli, site, tmp_path) -> None:
    """Exit code 1, the reason as one harmless line, marks of editable installs; detect and list import neither."""
    site.plugin("acme", PLANTED)
    site.plugin("brix", PLANTED)
    site.platform("cedar", probe="return Evidence(True, 'found')")
    record = site.folder / "acme-1.0.dist-info/RECORD"
    record.write_text(record.read_text() + "acme\x1b[31m.py,sha256=x,1\n")
    (site.folder / "brix-1.0.dist-info/direct_url.json").write_text(
        '{"url": "file:///x", "dir_info": {"editable": true}}'
    )
    told = cli("plugins", "lock")
    assert told.returncode == 1, told.stderr
    assert (
        "left out: acme 1.0: acme\\x1b[31m.py, which RECORD lists, is missing: reinstall it by your "
        in told.stdout
    )
    assert "left out: brix 1.0: it is an editable install" in told.stdout
    assert "locked: cedar-dist 1.0: opgraft.platforms: cedar = cedar_device:SPEC\n" in told.stdout
    listed = cli("plugins", "list", OPGRAFT_LOCKFILE="opgraft.lock")
    rows = {
        row["name"]: row
        for row in json.loads(
            cli("plugins", "list", "--json", "--lockfile", "opgraft.lock").stdout
        )["offers"]
    }
    assert {
        name: (rows[name]["status"], rows[name]["editable"]) for name in ("acme", "brix", "cedar")
    } == {
        "acme": ("rejected", False),
        "brix": ("rejected", True),
        "cedar": ("eligible", False),
    }
    assert "brix 1.0 (editable)" in listed.stdout
    assert "\x1b" not in told.stdout + listed.stdout
    assert cli("detect", "--lockfile", "opgraft.lock").stdout.startswith("platform: cedar (")
    assert cli("plugins", "doctor", "--lockfile", "opgraft.lock").returncode == 1
    assert not list(site.folder.glob("*.imported"))


def test_a_bug_report_comes_where_the_lockfile_cannot_be_used(cli, site) -> None:
    """'opgraft env' shows what is wrong with it; other commands end with 2, in JSON too."""
    site.plugin("acme", PLANTED)
    report = cli("env", "--json", OPGRAFT_LOCKFILE="none.lock")
    assert report.returncode == 0, report.stderr
    sections = json.loads(report.stdout)["sections"]
    assert (
        "the lockfile none.lock (OPGRAFT_LOCKFILE) cannot be used" in sections["Platform"]["error"]
    )
    assert "rejected: the lockfile none.lock" in sections["Plugins"]["plugin acme"]
    for command in (("detect",), ("plugins", "list"), ("plugins", "doctor")):
        assert cli(*command, OPGRAFT_LOCKFILE="none.lock").returncode == 2, command
    assert not list(site.folder.glob("*.imported"))


def test_a_lockfile_that_cannot_be_compared(cli, site, tmp_path) -> None:
    """The error names no setting: a comparison admits nothing. The default is no choice of the user."""
    (tmp_path / "torn.lock").write_text("{")
    for command, file in ((["diff"], "opgraft.lock"), (["diff", "torn.lock"], "torn.lock")):
        told = cli("plugins", *command)
        assert told.returncode == 2
        words = " ".join(told.stderr.split())
        assert f"error: the lockfile {file} cannot be compared: " in words
        assert f"Name another, or write it by 'opgraft plugins lock --output {file}'" in words
        assert "command line" not in words
        assert "admitted" not in words


def test_two_lockfiles_are_compared_in_words(cli, site, tmp_path) -> None:
    """Each distribution that differs has a line, with what is other, new or gone. Equal files have none."""
    for name in ("acme", "cedar"):
        site.plugin(name, PLANTED)
    assert cli("plugins", "lock", "--output", "old.lock").returncode == 0
    for name in ("acme", "cedar"):
        shutil.rmtree(site.folder / f"{name}-1.0.dist-info")
    site.plugin("acme", PLANTED, version="2.0")
    site.plugin("brix", PLANTED)
    assert cli("plugins", "lock", "--output", "new.lock").returncode == 0
    written = tmp_path / "new.lock"
    # A lockfile comes from anybody.
    written.write_text(written.read_text().replace("brix", "brix\\u001b[31m"))
    told = cli("plugins", "diff", "old.lock", "new.lock")
    assert (told.returncode, told.stderr) == (1, "")
    assert told.stdout.splitlines() == [
        "changed: acme 2.0: its version is 2.0, old.lock has 1.0",
        "changed: brix\\x1b[31m 1.0: it is not in old.lock",
        "changed: cedar 1.0: it is gone, nothing needs it any more, or the settings reject it",
    ]
    same = cli("plugins", "diff", "new.lock", "new.lock")
    assert (same.returncode, same.stdout) == (0, "nothing differs from new.lock\n")


def test_a_row_of_what_cannot_be_locked_any_more_is_kept(cli, site, tmp_path) -> None:
    """Doctor and lock give the same next step, and lock leaves the file alone until the plugin is gone."""
    site.plugin("acme", PLANTED)
    site.plugin("brix", PLANTED)
    assert cli("plugins", "lock").returncode == 0
    before = (tmp_path / "opgraft.lock").read_bytes()
    (site.folder / "acme.py").write_text("import this\n")
    step = "'pip install --force-reinstall --no-deps acme==1.0'"
    told = cli("plugins", "doctor", OPGRAFT_LOCKFILE="opgraft.lock").stdout
    assert step in " ".join(told.split())
    assert "plugins lock" not in told
    told = cli("plugins", "lock")
    words = " ".join(told.stdout.split())
    assert told.returncode == 1
    assert "left out: acme 1.0: acme.py is not the file that RECORD lists" in words
    assert step in words
    assert "not written: opgraft.lock stays as it was, as it would lose acme." in words
    assert json.loads(cli("plugins", "lock", "--json").stdout)["written"] is False
    assert (tmp_path / "opgraft.lock").read_bytes() == before
    new = cli("plugins", "lock", "--output", "new.lock")
    assert (new.returncode, "written to new.lock" in new.stdout) == (1, True)
    shutil.rmtree(site.folder / "acme-1.0.dist-info")
    assert cli("plugins", "lock").returncode == 0
    rows = json.loads((tmp_path / "opgraft.lock").read_text())["distributions"]
    assert [row["name"] for row in rows] == ["brix"]


def test_a_plugin_on_the_deny_list_leaves_the_file(cli, site, tmp_path) -> None:
    """The step that the command names for a lockfile without a damaged plugin works."""
    site.plugin("acme", PLANTED)
    assert cli("plugins", "lock").returncode == 0
    (site.folder / "acme.py").write_text("import this\n")
    told = cli("plugins", "lock")
    assert "OPGRAFT_PLUGINS_DISABLE=acme" in told.stdout
    cli("plugins", "lock", OPGRAFT_PLUGINS_DISABLE="acme")
    rows = json.loads((tmp_path / "opgraft.lock").read_text())["distributions"]
    assert "acme" not in [row["name"] for row in rows]


def test_the_doctor_knows_what_lock_would_leave_out(cli, site) -> None:
    """A plugin that is not in the lockfile, and cannot be locked, has a finding with the step."""
    assert cli("plugins", "lock").returncode == 0
    site.plugin("acme", PLANTED)
    (site.folder / "acme.py").write_text("import this\n")
    told = cli("plugins", "doctor", OPGRAFT_LOCKFILE="opgraft.lock")
    words = " ".join(told.stdout.split())
    assert "finding: 'opgraft plugins lock' leaves acme 1.0 out: acme.py is not the file" in words
    assert "reinstall it by your installer" in words


def test_a_locked_plugin_that_is_not_installed_is_a_finding(cli, site) -> None:
    """The doctor names it with the next step, and ends with 1."""
    site.plugin("acme", PLANTED)
    assert cli("plugins", "lock").returncode == 0
    shutil.rmtree(site.folder / "acme-1.0.dist-info")
    told = cli("plugins", "doctor", OPGRAFT_LOCKFILE="opgraft.lock")
    assert told.returncode == 1
    words = " ".join(told.stdout.split())
    assert "finding: acme 1.0 is in lockfile (OPGRAFT_LOCKFILE) opgraft.lock and not" in words
    assert "install this version, or lock without it by 'opgraft plugins lock" in words


def test_a_locked_plugin_in_quarantine_is_told(cli, site) -> None:
    """Its files are locked, and the line below says that no process imports them."""
    site.plugin("acme", "import os\nos.abort()\n")
    assert cli("plugins", "doctor").returncode == 4
    told = cli("plugins", "lock")
    words = " ".join(told.stdout.split())
    assert "locked: acme 1.0: opgraft.plugins: acme = acme no process imports it: in quar" in words
    assert told.returncode == 0
