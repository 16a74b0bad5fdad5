"""Quarantine: whose code took down or held up the process that tried it is left alone, visibly, until it changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import opgraft
import pytest
from opgraft import OpgraftConfig, load_plugins, set_config
from opgraft.errors import PlatformError, PluginError
from opgraft.machine.machine import Machine
from opgraft.ops import RMSNorm
from opgraft.plugins import quarantine
from opgraft.plugins.discovery import PLATFORM_GROUP, discover
from opgraft.plugins.memory import Memory
from opgraft.plugins.probing import ProbeFailed, ask
from opgraft.plugins.selection import selected_platform
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state
from support.faults.store_rows import huge, with_digest

PLUGIN = "import opgraft\nplatforms = 'any'\n@opgraft.hookimpl\ndef opgraft_veto(): pass\n"
ACME = Provider("acme", "1.0")
KILLS = "import os; open(__file__ + '.asked', 'a').write('x'); os.kill(os.getpid(), 11)"
WAY_OUT = "'opgraft plugins doctor --no-cache' tries it again, as a change of its files does"


def record() -> Path:
    """Where the record of the plugin acme is."""
    return Path(os.environ["XDG_STATE_HOME"]) / "opgraft/quarantine/acme.json"


def reason() -> str | None:
    """What a fresh process has against acme."""
    opgraft.reset()
    return quarantine.against(ACME)


def asked(name: str, time_limit: float = 10.0) -> str:
    """What becomes of a probe that fails."""
    (offer,) = (offer for offer in discover().of_group(PLATFORM_GROUP) if offer.name == name)
    with pytest.raises(ProbeFailed) as failure:
        ask(offer, Machine(), time_limit)
    return str(failure.value)


def test_a_probe_that_is_killed_is_not_asked_again(site, caplog) -> None:
    """The first process says what happened, the next one that it is left alone; forgotten, it is asked again."""
    site.platform("acme", probe=KILLS, plugin=PLUGIN)
    trace = site.folder / "acme_device.py.asked"

    def loaded() -> str:
        """What a fresh process says of the platform."""
        opgraft.reset()
        caplog.clear()
        load_plugins()
        (told,) = (row for row in selected_platform().decision.candidates if row.name == "acme")
        assert "probe acme_device:SPEC: its process ended with status -11" in told.reason
        assert told.reason.endswith(WAY_OUT)
        assert f"platform 'acme' of acme-dist 1.0 is left out: {told.reason}" in caplog.messages
        plugin = host_state().plugins["acme"]
        assert f"plugin 'acme' of acme-dist 1.0 is not used: {plugin.reason}" in caplog.messages
        return told.reason

    assert "it is in quarantine from now on" in loaded()
    assert loaded().startswith("in quarantine since 20")
    assert trace.read_text() == "x"
    quarantine.forget_all()
    assert "it is in quarantine from now on" in loaded()
    assert trace.read_text() == "xx"
    assert RMSNorm(4).op_class is RMSNorm


def test_a_probe_that_hangs(site) -> None:
    """It costs its time limit once."""
    site.platform("acme", probe="import time; time.sleep(60)")
    text = asked("acme", 3.0)  # of which a busy machine takes two to start it
    assert "it gave no answer within 3 s and was stopped; it is in quarantine from now on" in text
    assert "it gave no answer within 3 s" in str(quarantine.against(Provider("acme-dist", "1.0")))


@pytest.mark.parametrize(
    "probe",
    [
        "raise OSError('no driver')",
        "raise KeyboardInterrupt",
        "import os; os._exit(1)",
        "os = __import__('os'); os.kill(os.getpid(), 15)",
    ],
)
def test_what_is_no_reason(site, probe: str) -> None:
    """An exception of Python's, and a signal by which processes are ended from outside, leave no record."""
    site.platform("acme", probe=probe)
    assert "quarantine" not in asked("acme")
    assert quarantine.against(Provider("acme-dist", "1.0")) is None


def test_a_process_that_ends_itself_without_an_answer(site) -> None:
    """With status 0 too."""
    site.platform("acme", probe="import os; os._exit(0)")
    assert "its process ended with status 0; it is in quarantine" in asked("acme")


def test_another_version_or_installation_is_tried(site) -> None:
    """The record counts for what is installed as it was, under each spelling of its name."""
    site.plugin("acme", PLUGIN)
    quarantine.confine(ACME, "it crashed")
    assert str(reason()).endswith(f": it crashed; {WAY_OUT}")
    info = site.folder / "acme-1.0.dist-info/RECORD"
    before = info.read_text()
    info.write_text(f"{before}acme_more.py,,\n")
    assert reason() is None
    assert not record().exists()
    info.write_text(before)
    quarantine.confine(ACME, "it crashed")
    assert reason()
    quarantine.forget_all()
    assert reason() is None


def test_a_repaired_plugin_is_tried_again(site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that differs ends the quarantine of the same version; the same content, written anew, does not.

    Either way, a later process does not read the content again.
    """
    site.plugin("acme", PLUGIN)
    module = site.folder / "acme.py"
    quarantine.confine(ACME, "it crashed")
    os.utime(module, ns=(1, 1))
    assert str(reason()).startswith("in quarantine since")
    with monkeypatch.context() as patch:
        patch.delattr(quarantine, "digest_of_content")
        assert str(reason()).startswith("in quarantine since")
    module.write_text(f"{PLUGIN}# mended\n")
    assert reason() is None
    assert not record().exists()


def test_a_process_compares_a_distribution_once(site) -> None:
    """Each offer of a distribution has the answer to the first one, until the distribution is confined."""
    site.plugin("acme", PLUGIN)
    assert quarantine.against(ACME) is None
    quarantine.confine(ACME, "it crashed")
    assert quarantine.against(ACME)
    record().unlink()
    assert quarantine.against(ACME)
    assert reason() is None


def test_a_file_of_the_plugin_that_cannot_be_read(site) -> None:
    """The plugin stays in quarantine, the reason names the fault, and no new record is made."""
    site.plugin("acme", PLUGIN)
    quarantine.confine(ACME, "it crashed")
    module = site.folder / "acme.py"
    module.unlink()
    module.mkdir()
    told = str(reason())
    assert "it crashed; nothing tells whether its files have changed: IsADirectoryError" in told
    assert told.endswith(WAY_OUT)
    assert "nothing tells this installation from others" in quarantine.confine(ACME, "it crashed")


def test_a_distribution_without_a_list_of_files_is_tried_again(site) -> None:
    """A repair would leave no trace in the metadata."""
    site.plugin("acme", PLUGIN)
    (site.folder / "acme-1.0.dist-info/RECORD").unlink()
    told = quarantine.confine(ACME, "it crashed")
    assert told.startswith("it is tried again next time, as nothing tells this installation")
    assert told.endswith("it has no RECORD of its files")
    assert reason() is None


UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "RECORD cannot be read: it is no regular file"),
    "Latin-1": (lambda path: path.write_bytes(b"caf\xe9.py,,\n"), "RECORD is not UTF-8"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_installation_that_nothing_tells_from_others(site, kind: str) -> None:
    """If RECORD cannot be read, a former record counts, none is made, and the reason is told."""
    site.plugin("acme", PLUGIN)
    quarantine.confine(ACME, "it crashed")
    make, fault = UNREADABLE[kind]
    path = site.folder / "acme-1.0.dist-info/RECORD"
    path.unlink()
    make(path)
    assert fault in str(reason())
    told = quarantine.confine(ACME, "it crashed")
    assert told.startswith(
        "it is tried again next time, as nothing tells this installation from others: "
    )
    assert fault in told


def test_a_record_of_opgraft_itself_does_not_count(site) -> None:
    """What it brings is always asked."""
    site.plugin("acme", PLUGIN)
    quarantine.confine(ACME, "it crashed")
    record().rename(record().with_name("opgraft.json"))
    assert quarantine.against(Provider("opgraft", opgraft.__version__)) is None


def test_an_editable_install_is_tried_again(site) -> None:
    """Its source changes without a trace in its metadata."""
    site.plugin("acme", PLUGIN)
    origin = '{"url": "file:///x", "dir_info": {"editable": true}}'
    (site.folder / "acme-1.0.dist-info/direct_url.json").write_text(origin)
    assert (
        quarantine.confine(ACME, "it crashed")
        == "it is tried again next time, as it is an editable install"
    )
    assert reason() is None


def test_old_files_are_removed_beside_another_process(tmp_path: Path, monkeypatch) -> None:
    """Files that vanish meanwhile, as a link to nowhere does, are no error; unfinished ones stay."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    memory = Memory("results", most=1)
    memory.write("first", {})
    unfinished = memory.path("first").with_suffix(".json.x1y2")
    unfinished.touch()
    memory.write("second", {})
    assert [each.name for each in sorted(unfinished.parent.iterdir())] == [
        "first.json.x1y2",
        "second.json",
    ]
    memory.path("vanished").symlink_to("nowhere")
    memory.write("third", {})
    assert memory.read("third") == {}


def _directory(path: Path) -> None:
    path.mkdir()


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (lambda path: path.write_text('{"schema": "opgraft.quar'), "not as it was written"),
    "empty": (lambda path: path.write_text(""), "not as it was written"),
    "binary": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "Decode"),
    "no JSON": (with_digest(b"{"), "JSONDecodeError"),
    "nested": (with_digest(b"[" * 30_000), "RecursionError"),
    "a list": (with_digest(b"[]"), "it holds a list"),
    "other keys": (with_digest(b'{"schema": "opgraft.lock/1"}'), "unexpected keyword"),
    "too large": (huge, "larger than 16,777,216 bytes"),
    "a pipe": (os.mkfifo, "no regular file"),
    "a folder": (_directory, "Is a directory"),
    "a link to itself": (lambda path: path.symlink_to(path), "symbolic links"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_record_that_cannot_be_used(site, caplog, kind: str) -> None:
    """It does not count; a warning and a finding name the file, the fault and the command that removes it."""
    site.plugin("acme", PLUGIN)
    record().parent.mkdir(parents=True)
    make, fault = BROKEN[kind]
    make(record())
    load_plugins()
    assert host_state().plugins["acme"].reason == "applies on any"
    (finding,) = quarantine.findings()
    assert (
        f"the record of a quarantine of acme 1.0, {record()}, cannot be used and does not count: "
        in finding.message
    )
    assert fault in finding.message
    assert finding.message.endswith("'opgraft plugins doctor --no-cache' removes it")
    assert finding.message in caplog.messages
    if kind != "a folder":
        quarantine.forget_all()
        assert quarantine.findings() == []


def test_where_nothing_can_be_remembered(
    site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder that cannot be written to, and no home at all: told with the fault, and nobody is held up."""
    site.plugin("acme", PLUGIN)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    told = quarantine.confine(ACME, "it crashed")
    assert told == f"it is tried again next time, as {record()} cannot be written: Not a directory"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", "~")
    assert "no home folder in which to remember it" in quarantine.confine(ACME, "it crashed")
    assert quarantine.against(ACME) is None
    quarantine.forget_all()


def test_who_asks_for_it_by_name_or_strictly_gets_an_error(site) -> None:
    """As for any other plugin that was asked for and is not used."""
    site.plugin("acme", PLUGIN)
    quarantine.confine(ACME, "it crashed")
    for config, begins in (
        ({"plugins": ["acme"]}, "asks for plugin 'acme'"),
        ({"strict": True}, "strict mode: plugin"),
    ):
        words = rf"{begins}.*it crashed.* as a change of its files does\.?$"
        with set_config(OpgraftConfig(**config)), pytest.raises(PluginError, match=words):
            load_plugins()
    site.platform("brix", probe="return Evidence(True, 'here')")
    opgraft.reset()
    quarantine.confine(Provider("brix-dist", "1.0"), "it crashed")
    for config, words in (
        ({"platform": "brix"}, "cannot be used here"),
        ({"strict": True}, "strict mode: platform"),
    ):
        with (
            set_config(OpgraftConfig(**config)),
            pytest.raises(PlatformError, match=f"{words}.*it crashed"),
        ):
            load_plugins()


def test_the_doctor_tells_of_a_plugin_once_in_strict_mode(cli, site) -> None:
    """Strict mode makes an error of what is a finding already, which is told once all the same."""
    site.plugin("acme", "import os\nos.abort()\n")
    for _ in range(2):
        result = cli("plugins", "doctor", "--json", OPGRAFT_STRICT="1")
        (finding,) = json.loads(result.stdout)["findings"]
        assert (result.returncode, finding["provider"]["name"]) == (4, "acme")
        assert WAY_OUT in finding["message"]
    assert cli("plugins", "doctor", OPGRAFT_STRICT="1").stdout.count("in quarantine since") == 1


def test_the_doctor_goes_on_without_whom_it_crashed_on(cli, site) -> None:
    """One run names two plugins that end the process, and looks at the third; the next run imports neither."""
    for name in ("acme", "brix"):
        site.plugin(name, "import os\nopen(__file__ + '.tried', 'a').write('x')\nos.abort()\n")
    site.plugin("cedar", PLUGIN)
    for _ in range(2):
        result = cli("plugins", "doctor", "--json")
        answer = json.loads(result.stdout)
        assert result.returncode == 4
        statuses = {row["name"]: row["status"] for row in answer["plugins"]}
        assert statuses == {"acme": "rejected", "brix": "rejected", "cedar": "activated"}
        assert sorted(finding["provider"]["name"] for finding in answer["findings"]) == [
            "acme",
            "brix",
        ]
        for finding in answer["findings"]:
            name = finding["provider"]["name"]
            assert (
                f"plugin '{name}' of {name} 1.0 while it was loaded crashed the process with"
                in finding["message"]
            )
            assert "SIGABRT" in finding["message"]
            assert WAY_OUT in finding["message"]
        assert {file.read_text() for file in site.folder.glob("*.tried")} == {
            "xx"
        }  # with others, and alone
    assert "in quarantine since" in cli("plugins", "list").stdout
    assert cli("plugins", "doctor", "--no-cache").returncode == 4
    assert {file.read_text() for file in site.folder.glob("*.tried")} == {"xxxx"}
