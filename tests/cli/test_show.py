"""'opgraft plugins show' without --load: what is known of a plugin before anything of it is imported."""

from __future__ import annotations

import json
import subprocess

import pytest

PLANTED = "open(__file__ + '.imported', 'w').close()\n"
UNLISTED = ("RECORD", "site", "acme-1.0.dist-info")
PROBE = f"return Evidence(True, 'found')\n{PLANTED}"


def shown(cli, name: str, **variables: str) -> tuple[int, dict, list[dict]]:
    """The exit code, what is shown of the plugin of that name, and the findings."""
    result = cli("plugins", "show", name, "--json", **variables)
    answer = json.loads(result.stdout)
    (offer,) = (offer for offer in answer["offers"] if offer["kind"] == "plugin")
    return result.returncode, offer, answer["findings"]


def test_nothing_of_a_plugin_is_imported(cli, site) -> None:
    """List, show and lock leave a plugin's modules alone, those of its platform too; show --load imports them."""
    site.platform("acme", probe=PROBE, platform=PLANTED, plugin=PLANTED)
    site.plugin("brix", PLANTED, requires=["opgraft>=99"])
    for command in (
        ["list"],
        ["lock"],
        *(["show", name] for name in ("acme", "acme-dist", "brix")),
    ):
        cli("plugins", *command)
        cli("plugins", *command, OPGRAFT_LOCKFILE="opgraft.lock")
        assert list(site.folder.glob("*.imported")) == [], command
    cli("plugins", "show", "acme", "--load")
    assert {file.name for file in site.folder.glob("*.imported")} == {
        "acme_device.py.imported",
        "acme_platform.py.imported",
    }


def test_what_is_known_before_loading(cli, site) -> None:
    """Metadata, the lock, and whether the settings admit it; in words, the way to load it stands below."""
    site.plugin("acme", PLANTED, requires=["opgraft>=0.1", "torch"])
    code, offer, findings = shown(cli, "acme")
    assert (code, findings) == (0, [])
    assert offer == {
        "kind": "plugin",
        "name": "acme",
        "provider": {"name": "acme", "version": "1.0"},
        "entry_point": "acme",
        "editable": False,
        "requires": ["opgraft>=0.1", "torch"],
        "lock": None,
        "contents": {
            "files": 4,
            "bytes": sum(
                file.stat().st_size for file in site.folder.rglob("*") if file.name not in UNLISTED
            ),
            "damage": None,
            "libraries": [],
            "publisher": None,
        },
        "identity": None,
        "evidence": None,
        "judged": None,
        "status": "selected",
        "reason": "",
    }
    lines = cli("plugins", "show", "acme").stdout.splitlines()
    assert "requires: opgraft>=0.1, torch" in lines
    absent = ["native libraries: none", "signer: unknown", "evidence: none"]
    assert [line for line in lines if line in absent] == absent
    assert lines[-1] == "to load it, and see what becomes of it: opgraft plugins show acme --load"


def test_what_its_files_are(cli, site, tmp_path) -> None:
    """Size, damage, native libraries with what they link, and a publisher, all harmless on a terminal."""
    (tmp_path / "native.c").write_text("double cos(double);double f(double x){return cos(x);}")
    built = tmp_path / "native.so"
    source = str(tmp_path / "native.c")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", str(built), "-lm"], check=True)
    files = {"acme.py": PLANTED, "acme_native.so": "", "acme_text.so": "no library"}
    site.install("acme", files, {"opgraft.plugins": ["acme = acme"]})
    metadata = site.folder / "acme-1.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text() + "Author-Email: Acme \x1b[31m <acme@example.com>\n")
    (site.folder / "acme_native.so").write_bytes(built.read_bytes())
    contents = shown(cli, "acme")[1]["contents"]
    assert contents["libraries"][0]["links"][0].startswith("libm.so")
    assert contents["libraries"][1] == {"file": "acme_text.so", "links": None, "problem": None}
    assert contents["damage"].startswith("acme_native.so is not the file that RECORD lists")
    text = cli("plugins", "show", "acme").stdout
    assert "native library: acme_native.so links libm.so" in text
    assert "native libraries:" not in text
    assert "publisher: Acme \\x1b[31m <acme@example.com>, as the metadata says" in text


def test_how_it_compares_with_the_lockfile(cli, site) -> None:
    """As it was locked; changed, which is a finding; of a lockfile that cannot be used the command ends with 2."""
    site.plugin("acme", PLANTED)
    assert cli("plugins", "lock").returncode == 0
    code, offer, findings = shown(cli, "acme", OPGRAFT_LOCKFILE="opgraft.lock")
    assert (code, offer["lock"], findings) == (0, "as it is in opgraft.lock", [])
    (site.folder / "acme.py").write_text(f"{PLANTED}# more")
    code, offer, (finding,) = shown(cli, "acme", OPGRAFT_LOCKFILE="opgraft.lock")
    assert (code, offer["status"]) == (1, "rejected")
    assert offer["lock"].startswith("acme.py is not the file that RECORD lists: it has ")
    assert offer["lock"] in finding["message"]
    text = cli("plugins", "show", "acme", OPGRAFT_LOCKFILE="opgraft.lock").stdout
    assert " ".join(text.split()).count("acme.py is not the file that RECORD lists") == 1
    assert "--load" not in text
    denied = shown(cli, "acme", OPGRAFT_LOCKFILE="opgraft.lock", OPGRAFT_PLUGINS_DISABLE="acme")
    assert (denied[0], denied[1]["reason"]) == (
        0,
        "on the deny list plugins_disable (OPGRAFT_PLUGINS_DISABLE)",
    )
    assert denied[1]["lock"] == offer["lock"]
    assert cli("plugins", "show", "acme", OPGRAFT_LOCKFILE="none.lock").returncode == 2


@pytest.mark.parametrize(
    ("requires", "reason"),
    [
        ("opgraft>=99", "it requires 'opgraft>=99', this is"),
        ("torch>=99", "it requires 'torch>=99', this is torch 2."),
        ("opgraft=>1", "its requirement 'opgraft=>1' is malformed"),
    ],
)
def test_a_requirement_that_is_not_met(cli, site, requires: str, reason: str) -> None:
    """It is the reason, and a finding, with the doctor's exit code."""
    site.plugin("acme", PLANTED, requires=[requires])
    code, offer, (finding,) = shown(cli, "acme")
    assert (code, offer["requires"]) == (1, [requires])
    assert offer["reason"].startswith(reason)
    assert offer["reason"] in finding["message"]


def test_an_editable_install_is_marked(cli, site) -> None:
    """It stands in a line of its own. RECORD does not say then which native libraries there are."""
    site.plugin("acme", PLANTED)
    origin = '{"url": "file:///x", "dir_info": {"editable": true}}'
    (site.folder / "acme-1.0.dist-info/direct_url.json").write_text(origin)
    assert shown(cli, "acme")[1]["editable"] is True
    text = cli("plugins", "show", "acme").stdout
    assert "editable: yes\n" in text
    assert "native libraries: unknown\n" in text


def test_native_libraries_are_unknown_without_a_record(cli, site) -> None:
    """Without RECORD, no file is known, and nothing is said to be absent."""
    site.plugin("acme", PLANTED)
    (site.folder / "acme-1.0.dist-info/RECORD").unlink()
    assert "native libraries: unknown\n" in cli("plugins", "show", "acme").stdout
