"""Lockfiles: what they pin, every way in which a distribution can differ from its row, and that nothing is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import opgraft
import pytest
from conftest import Site
from opgraft import OpgraftConfig, current_platform, load_plugins, set_config
from opgraft.config import resolve
from opgraft.errors import ConfigError, InputError, PlatformError, PluginError
from opgraft.ops import RMSNorm
from opgraft.plugins.admission import objection
from opgraft.plugins.discovery import PLUGIN_GROUP, discover
from opgraft.plugins.locking import LockedPackage, read_rows
from opgraft.plugins.making_locks import lock_installed, write_rows
from opgraft.plugins.selection import selected_platform
from opgraft.registry.state import PluginStatus, host_state
from support.locks import PLUGIN, lock, reason
from support.wheels import row_of

EDITABLE = '{"url": "file:///source", "dir_info": {"editable": true}}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "opgraft.lock"


def planted(folder: Path) -> str:
    """The source of a plugin that leaves a file when it is imported."""
    return f"open({str(folder / 'imported')!r}, 'w').close()\n{PLUGIN}"


def test_what_was_locked_is_admitted(site, path: Path) -> None:
    """Locking and looking at it imports nothing; the rows hold version, RECORD and entry points, in order of names."""
    site.plugin("zeta", planted(site.folder))
    site.platform("acme", probe="return Evidence(False, 'none')", plugin=planted(site.folder))
    assert lock(path) == []
    assert reason(path) is reason(path, "zeta") is None
    assert not (site.folder / "imported").exists()
    acme, zeta = read_rows(str(path))
    assert (zeta.name, zeta.version, zeta.editable) == ("zeta", "1.0", False)
    assert acme.entry_points == (
        "opgraft.platforms: acme = acme_device:SPEC",
        "opgraft.plugins: acme = acme_plugin",
    )
    assert path.stat().st_mode & 0o777 == 0o644
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(path.name)] == [
        path.name
    ]


def test_a_distribution_as_pip_installs_it(toy_npu: Path, path: Path) -> None:
    """RECORD as pip writes it, with rows of compiled bytecode and line ends of its own, is read and compared."""
    assert lock(path) == []
    assert reason(path, "toy_npu") is None
    module = toy_npu / "opgraft_toy_npu/plugin.py"
    before = module.read_bytes()
    try:
        module.write_bytes(before + b"\n")
        assert "opgraft_toy_npu/plugin.py is not the file that RECORD lists" in (
            reason(path, "toy_npu") or ""
        )
    finally:
        module.write_bytes(before)


def rewritten(site: Site, file: str, change: Callable[[str], str]) -> None:
    place = site.folder / file
    place.write_text(change(place.read_text()))


def another_version(site: Site) -> None:
    rewritten(
        site,
        "acme-1.0.dist-info/METADATA",
        lambda text: text.replace("Version: 1.0", "Version: 1.0.post1"),
    )


def another_point(site: Site) -> None:
    rewritten(site, "acme-1.0.dist-info/entry_points.txt", lambda text: f"{text}more = acme_more\n")


def another_record(site: Site) -> None:
    rewritten(site, "acme-1.0.dist-info/RECORD", lambda text: f"{text}acme_more.py,sha256=x,1\n")


def another_letter(site: Site) -> None:
    rewritten(site, "acme.py", lambda text: text.replace("pass", "Pass"))


def another_size(site: Site) -> None:
    rewritten(site, "acme.py", lambda text: f"{text}#")


def a_pipe(site: Site) -> None:
    (site.folder / "acme.py").unlink()
    os.mkfifo(site.folder / "acme.py")


def editable(site: Site) -> None:
    (site.folder / "acme-1.0.dist-info/direct_url.json").write_text(EDITABLE)


def bytes_for_a_record(site: Site) -> None:
    (site.folder / "acme-1.0.dist-info/RECORD").write_bytes(b"\xff\xfe")


CHANGES: dict[str, tuple[Callable[[Site], None], str]] = {
    "version": (
        another_version,
        "its version is 1.0.post1, {path} has 1.0: acme-1.0.dist-info/METADATA is not the file",
    ),
    "entry points": (
        another_point,
        "its entry points have changed (new: opgraft.plugins: more = acme_more)",
    ),
    "RECORD": (
        another_record,
        "its RECORD lists other files or hashes: the SHA-256 of the list is ",
    ),
    "content": (another_letter, "acme.py is not the file that RECORD lists: its sha256 differs"),
    "size": (another_size, "acme.py is not the file that RECORD lists: it has "),
    "pipe": (a_pipe, "acme.py is no regular file"),
    "missing": (
        lambda site: (site.folder / "acme.py").unlink(),
        "acme.py, which RECORD lists, is missing",
    ),
    "editable": (editable, "it is an editable install: "),
    "no RECORD": (
        lambda site: (site.folder / "acme-1.0.dist-info/RECORD").unlink(),
        "it has no RECORD",
    ),
    "RECORD that is no text": (
        bytes_for_a_record,
        "its metadata cannot be read: ValueError: RECORD begins",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_has_changed_is_not_imported_and_the_reason_says_what(
    site, path: Path, kind: str, monkeypatch
) -> None:
    """Whatever was changed since it was locked, the plugin is rejected, by name it is an error, and a finding."""
    change, words = CHANGES[kind]
    site.plugin("acme", planted(site.folder))
    lock(path)
    change(site)
    told = reason(path)
    assert told is not None
    assert told.startswith("locked out by lockfile (OPGRAFT_LOCKFILE): ")
    assert words.format(path=path) in told
    monkeypatch.setenv("OPGRAFT_LOCKFILE", str(path))
    opgraft.reset()
    load_plugins()
    record = host_state().plugins["acme"]
    assert (record.status, record.reason) == (PluginStatus.REJECTED, told)
    opgraft.reset()
    with (
        set_config(OpgraftConfig(plugins=["acme"])),
        pytest.raises(PluginError, match=r"asks for plugin 'acme'.*locked out"),
    ):
        load_plugins()
    assert not (site.folder / "imported").exists()


def test_what_is_not_listed_is_not_imported(site, path: Path) -> None:
    """A plugin that came after the lockfile is rejected; so is all in an empty one."""
    lock(path)
    site.plugin("acme", planted(site.folder))
    assert f"it is not in {path}: 'opgraft plugins lock' adds it" in (reason(path) or "")


def test_a_module_that_lies_in_the_way_is_not_imported(
    site, path: Path, tmp_path, monkeypatch
) -> None:
    """A file or package of the plugin's name earlier on the path, which no RECORD lists, is named."""
    site.install(
        "acme",
        {"acme/__init__.py": "", "acme/inner.py": PLUGIN},
        {"opgraft.plugins": ["acme = acme.inner"]},
    )
    lock(path)
    assert reason(path) is None
    assert "acme" not in sys.modules
    other = tmp_path / "other"
    other.mkdir()
    (other / "acme.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(other))
    assert f"its module acme.inner would be imported from {other / 'acme.py'}" in (
        reason(path) or ""
    )


@pytest.mark.parametrize("added", ["helper/__init__.py", "inner/fast.abi3.so", "__init__.abi3.so"])
def test_a_module_that_is_put_into_a_package_is_not_imported(site, path: Path, added: str) -> None:
    """A package comes before a module of its name, and a library before both; bytecode of what is listed is fine."""
    files = {"brix/__init__.py": PLUGIN, "brix/helper.py": "", "brix/inner/__init__.py": ""}
    site.install("brix", files, {PLUGIN_GROUP: ["brix = brix"]})
    (site.folder / "brix/__pycache__").mkdir()
    (site.folder / "brix/__pycache__/helper.cpython-311.pyc").write_bytes(b"")
    assert lock(path) == []
    assert reason(path, "brix") is None
    place = site.folder / "brix" / added
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(b"")
    assert f"{place}" in (reason(path, "brix") or "")
    assert "RECORD does not list" in (reason(path, "brix") or "")


def test_a_module_without_a_hash_is_not_imported(site, path: Path) -> None:
    """A RECORD that lists the plugin's module without a hash says nothing about it, and cannot be locked."""
    site.plugin("acme", PLUGIN)
    rewritten(
        site, "acme-1.0.dist-info/RECORD", lambda text: "acme.py,,\n" + text.partition("\n")[2]
    )
    (left_out,) = lock(path)
    assert (
        f"its module acme would be imported from {site.folder / 'acme.py'}, which its RECORD does not"
        in left_out
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("acme.py,md5=x,1", "the hash of acme.py in its RECORD is 'md5', expected one of sha256"),
        ("acme.py", "its RECORD is malformed: ValueError"),
        ("acme.py,sha256=x,1,more", "its RECORD is malformed: ValueError"),
        ("\0,sha256=x,1", ""),
        ("acme.py/acme.py,sha256=x,1", "acme.py/acme.py cannot be read: NotADirectoryError"),
    ],
)
def test_a_record_that_cannot_be_compared_is_not_locked(
    site, path: Path, row: str, words: str
) -> None:
    """It is left out with the reason."""
    site.plugin("acme", PLUGIN)
    rewritten(site, "acme-1.0.dist-info/RECORD", lambda text: f"{row}\n{text}")
    (left_out,) = lock(path)
    assert words in left_out
    assert read_rows(str(path)) == []


def test_what_counts_outside_of_the_folder_of_modules(site, path: Path) -> None:
    """Programs and data may change or be missing; a library may be missing, large, and not changed."""
    outside = site.folder.parent
    library = b"\0" * ((1 << 24) + 1)
    rows = "../bin/acme,sha256=x,3\n../etc/acme.conf,sha256=x,3\n"
    rows += row_of("../lib/libacme.so.2", library)
    site.plugin("acme", PLUGIN)
    rewritten(site, "acme-1.0.dist-info/RECORD", lambda text: rows + text)
    assert lock(path) == []
    for name in ("bin/acme", "etc/acme.conf", "lib/libacme.so.2"):
        (outside / name).parent.mkdir()
        (outside / name).write_bytes(library)
    assert reason(path) is None
    (outside / "lib/libacme.so.2").write_bytes(library[:-1] + b"1")
    assert "../lib/libacme.so.2 is not the file that RECORD lists" in (reason(path) or "")


def test_a_module_among_programs_is_not_imported(site, path: Path, monkeypatch) -> None:
    """Python puts the folder of a running program first, and no row for it counts."""
    site.plugin("acme", PLUGIN)
    assert lock(path) == []
    program = site.folder.parent / "bin/acme.py"
    program.parent.mkdir()
    program.write_text(PLUGIN)
    row = row_of("../bin/acme.py", PLUGIN.encode())
    rewritten(site, "acme-1.0.dist-info/RECORD", lambda text: text + row)
    assert reason(path) is None
    monkeypatch.syspath_prepend(str(program.parent))
    assert f"its module acme would be imported from {program}" in (reason(path) or "")


def test_an_editable_install_needs_to_be_allowed(site, path: Path) -> None:
    """Without the allowance it is left out and not admitted; with it, it is marked, and its source is not compared."""
    site.plugin("acme", PLUGIN)
    editable(site)
    (left_out,) = lock(path)
    assert (
        "it is an editable install, whose source can change: --allow-editable locks it" in left_out
    )
    assert "it is not in" in (reason(path) or "")
    assert lock(path, allow_editable=True) == []
    (row,) = read_rows(str(path))
    assert row.editable
    rewritten(site, "acme-1.0.dist-info/RECORD", lambda text: text)
    assert reason(path) is None
    (site.folder / "acme-1.0.dist-info/direct_url.json").unlink()
    assert "it is no longer an editable install" in (reason(path) or "")


def test_lists_and_versions_come_first(site, path: Path) -> None:
    """What the settings reject is not locked, as asked for; what does not fit is left out with the reason."""
    site.plugin("acme", PLUGIN)
    site.plugin("newer", PLUGIN, requires=["opgraft>=99"])
    denied = resolve([("here", OpgraftConfig(plugins_disable=["acme"]))])
    rows, (left_out,) = lock_installed(denied, allow_editable=False)
    assert rows == []
    assert left_out.provider.name == "newer"
    assert left_out.reason.startswith("it requires 'opgraft>=99', this is opgraft ")
    write_rows(path, [])
    assert "it requires" in (reason(path, "newer") or "")


def test_a_denied_plugin_that_another_one_needs(site, path: Path) -> None:
    """It is locked with its own dependencies: a machine without the deny list admits it."""
    site.plugin("acme", PLUGIN, requires=["opgraft", "brix"])
    site.plugin("brix", PLUGIN, requires=["opgraft", "cedar"])
    site.install("cedar", {"cedar.py": ""}, {})
    denied = resolve([("here", OpgraftConfig(plugins_disable=["brix"]))])
    opgraft.reset()
    rows, left_out = lock_installed(denied, allow_editable=False)
    assert left_out == []
    needed = {row.name: row.dependencies for row in rows}
    assert needed == {"acme": ("brix", "cedar"), "brix": ("cedar",), "cedar": ()}
    write_rows(path, rows)
    (site.folder / "cedar.py").write_text("changed = 1")
    assert "its dependency cedar: cedar.py is not the file" in (reason(path, "brix") or "")


def test_a_malformed_requirement_of_a_dependency(site, path: Path) -> None:
    """The reason names the dependency, not the plugin."""
    site.plugin("acme", PLUGIN, requires=["opgraft", "cedar"])
    site.install("cedar", {"cedar.py": ""}, {}, requires=["more =>1"])
    (left_out,) = lock(path)
    assert left_out.startswith("the requirement of cedar 'more =>1' is malformed: ")


def test_the_probe_of_a_changed_platform_is_not_run(site, path: Path, monkeypatch) -> None:
    """Neither here nor in a child process; asked for by name it is an error of the platform."""
    trace = site.folder / "probed"
    site.platform(
        "acme", probe=f"open({str(trace)!r}, 'w').close(); return Evidence(True, 'found')"
    )
    lock(path)
    monkeypatch.setenv("OPGRAFT_LOCKFILE", str(path))
    opgraft.reset()
    assert current_platform().name == "acme"
    assert trace.exists()
    trace.unlink()
    another = site.folder / "acme_platform.py"
    another.write_text(f"{another.read_text()}\n")
    opgraft.reset()
    assert current_platform().name == "cpu"
    (candidate,) = (c for c in selected_platform().decision.candidates if c.name == "acme")
    assert "acme_platform.py is not the file that RECORD lists" in candidate.reason
    assert {c.name: c.accepted for c in selected_platform().decision.candidates}[
        "cpu"
    ]  # ours are not subject to it
    opgraft.reset()
    with (
        set_config(OpgraftConfig(platform="acme")),
        pytest.raises(PlatformError, match="cannot be used here: locked out"),
    ):
        current_platform()
    assert not trace.exists()


def good() -> dict[str, object]:
    row = LockedPackage("acme", "1.0", "00", False).to_dict()
    return {"schema": "opgraft.lock/2", "distributions": [row]}


def with_row(**values: object) -> str:
    data = good()
    return json.dumps({**data, "distributions": [{**data["distributions"][0], **values}]})  # type: ignore[index]


BROKEN = {
    "torn": (json.dumps(good())[:-30], "Unterminated string|Expecting"),
    "empty": ("", "Expecting value"),
    "no text": (b"\xff\xfe\x00", "codec can't decode"),
    "another file": (
        '{"schema": "opgraft.lock/1", "distributions": []}',
        "no object of the schema 'opgraft.lock/2'",
    ),
    "a list": ("[]", "no object of the schema"),
    "deep": ("[" * 100_000, "recursion"),
    "no rows": ('{"schema": "opgraft.lock/2"}', "other keys than"),
    "rows of another type": (
        '{"schema": "opgraft.lock/2", "distributions": {}}',
        "other keys than",
    ),
    "a key too many": (with_row(more=1), "is no row of a distribution"),
    "a wrong type": (with_row(editable="no"), "is no row of a distribution"),
    "entry points of a wrong type": (
        with_row(entry_points=[1]),
        "the entry points of 'acme' are no list of strings",
    ),
    "dependencies of a wrong type": (
        with_row(dependencies="brix"),
        "the dependencies of 'acme' are no list of strings",
    ),
    "a signer without a workflow": (
        with_row(identity={"source": "x", "issuer": "y"}),
        "is no row of a distribution",
    ),
    "twice": (
        json.dumps({**good(), "distributions": good()["distributions"] * 2}),
        "'acme' stands in it twice",
    ),  # type: ignore[operator]
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_lockfile_that_cannot_be_used_admits_nothing(
    site, path: Path, kind: str, monkeypatch
) -> None:
    """The error names file, setting, reason and the next step, with or without plugins; none is imported."""
    content, words = BROKEN[kind]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setenv("OPGRAFT_LOCKFILE", str(path))
    for name in ("", "acme"):
        if name:
            site.plugin(name, planted(site.folder))
        opgraft.reset()
        expected = f"(?s)the lockfile .*opgraft.lock \\(OPGRAFT_LOCKFILE\\) cannot be used: .*({words}).*plugins lock"
        with pytest.raises(ConfigError, match=expected) as caught:
            load_plugins()
        assert caught.value.exit_code == 2
    assert not (site.folder / "imported").exists()


def test_a_lockfile_that_cannot_be_opened(tmp_path, monkeypatch) -> None:
    """A path to nothing, to a folder, to a pipe, an empty one, and an endless file end at once in the same error."""
    os.mkfifo(tmp_path / "pipe")
    cases = {
        "none": "No such file",
        ".": "directory|regular",
        "pipe": "no regular file",
        "/dev/zero": "no regular file",
    }
    monkeypatch.chdir(tmp_path)
    for name, words in {**cases, "": "No such file"}.items():
        opgraft.reset()
        with (
            set_config(OpgraftConfig(lockfile=name)),
            pytest.raises(ConfigError, match=f"cannot be used: .*({words})"),
        ):
            current_platform()


def test_a_lockfile_of_many_bytes_is_not_read(path: Path) -> None:
    """What is larger than any lockfile is an error, not a full memory."""
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="larger than"):
        read_rows(str(path))


def test_writing_leaves_the_former_file_or_the_new_one(site, path: Path, tmp_path) -> None:
    """A file that cannot be written is an error, leaves what was there and nothing beside it."""
    lock(path)
    before = path.read_bytes()
    site.plugin("acme", PLUGIN)
    for place in (tmp_path / "missing/opgraft.lock", tmp_path, Path(os.devnull)):
        with pytest.raises(InputError, match=r"cannot be written: .*: name another by --output"):
            write_rows(place, [])
    assert path.read_bytes() == before
    assert not Path(os.devnull).is_file()
    lock(path)
    assert [row.name for row in read_rows(str(path))] == ["acme"]


def test_files_are_compared_once(site, path: Path, monkeypatch) -> None:
    """A second look at the same lockfile reads nothing, and a plugin that is locked runs as without a lockfile."""
    site.install(
        "acme",
        {"acme.py": PLUGIN, "acme.bin": "x" * ((1 << 20) + 1)},
        {"opgraft.plugins": ["acme = acme"]},
    )
    lock(path)
    monkeypatch.setenv("OPGRAFT_LOCKFILE", str(path))
    opgraft.reset()
    load_plugins()
    assert host_state().plugins["acme"].status is PluginStatus.ACTIVATED
    (site.folder / "acme.bin").unlink()
    (offer,) = discover().of_group(PLUGIN_GROUP)
    assert objection(offer, host_state().settings()) is None
    opgraft.reset()
    assert objection(discover().of_group(PLUGIN_GROUP)[0], host_state().settings()) is not None


def test_another_lockfile_once_plugins_are_loaded(site, path: Path) -> None:
    """A scope that asks for another lockfile than the process has loaded its plugins with is an error."""
    lock(path)
    load_plugins()
    with (
        set_config(OpgraftConfig(lockfile=str(path))),
        pytest.raises(PluginError, match="sets lockfile to"),
    ):
        RMSNorm(8)


def test_nothing_new_is_imported_without_a_lockfile() -> None:
    """What reads lockfiles is imported by the first one that is set, as detection waits for imports."""
    code = (
        "import sys; from opgraft.cli import cli; cli(['detect'], standalone_mode=False); "
        "sys.exit('opgraft.plugins.locking' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )
