"""The doctor names each fault that is planted, with whose it is, and what is in order stays as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Site
from support.faults.doctor_rows import (
    ENDS,
    FINDINGS,
    NATIVE,
    PLACELESS,
    POINTS,
    WITH_A_PLACE,
    kernel,
)
from support.faults.planting import GOOD, others_are_as_they_were
from support.faults.process_rows import IMPORTS, PLUGIN, SET_BACK

LIMITS = ("--time-limit", "20", "--memory-limit", "2.5")


def found(
    cli, *arguments: str, **variables: str
) -> tuple[int, dict[str, list[dict[str, Any]]], dict[str, str]]:
    """The exit code of the doctor, what it finds by distribution, and what became of each plugin."""
    ended = cli("plugins", "doctor", "--json", *arguments, **variables)
    report = json.loads(ended.stdout)
    findings: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        findings.setdefault((finding["provider"] or {"name": ""})["name"], []).append(finding)
    return ended.returncode, findings, {row["name"]: row["status"] for row in report["plugins"]}


def expect(
    findings: list[dict[str, Any]], words: str, code: int, kind: str, file: str = ""
) -> None:
    """One of the findings has these words, this exit code and this file."""
    told = [
        (finding["message"], finding["exit_code"], finding["location"] or "")
        for finding in findings
    ]
    found = [
        row for row in told if words in row[0] and row[1] == code and file in f"{row[0]} ({row[2]})"
    ]
    assert found, f"{kind}: {told}"


def test_everything_at_once(cli, site) -> None:
    """In one run each finding has its distribution, the worst decides the exit code, and nobody else is named."""
    site.plugin("brix", GOOD)
    names = {kind: f"acme-{number}" for number, kind in enumerate(FINDINGS)}
    for kind, name in names.items():
        site.plugin(name, FINDINGS[kind][0])
    points = {kind: f"point-{number}" for number, kind in enumerate(POINTS)}
    for kind, name in points.items():
        group, value, _ = POINTS[kind]
        site.install(
            name,
            {"acme_points.py": "" if "platform" in group else "import opgraft\n"},
            {group: [f"{name} = {value}"]},
        )
    code, findings, statuses = found(cli)
    assert code == 4
    for kind, name in names.items():
        expect(
            findings[name], FINDINGS[kind][1], FINDINGS[kind][2], kind, file_of(site, name, kind)
        )
    for kind, name in points.items():
        expect(
            findings[name], POINTS[kind][2], 4 if POINTS[kind][0] == "opgraft.plugins" else 1, kind
        )
    assert statuses["brix"] == "activated"
    assert not findings.keys() - {*names.values(), *points.values()}


def file_of(site: Site, name: str, kind: str) -> str:
    """The beginning of a place in the plugin of that name; a plugin without a hook has none that is to blame."""
    return "" if kind in PLACELESS else f"{site.folder / name.replace('-', '_')}.py:"


@pytest.mark.parametrize(
    ("when", "every"),
    [
        pytest.param("while it was loaded", 1, marks=pytest.mark.faults),
        pytest.param("in its hook opgraft_veto", 1, marks=pytest.mark.faults),
        ("in its hook opgraft_veto", 2),
    ],
)
def test_every_change_of_the_process(cli, site, when: str, every: int) -> None:
    """In one run each change is told of the one who made it, with its file, and nobody meets that of another."""
    site.plugin("brix", GOOD)
    names = {change: f"acme-{number}" for number, change in enumerate([*SET_BACK][::every])}
    for change, name in names.items():
        source = (change, "pass") if when == "while it was loaded" else ("", change)
        site.plugin(name, f"{IMPORTS}{source[0]}{PLUGIN.format(source[1])}")
    code, findings, statuses = found(cli, TAKEN="as it was")
    assert code == 1
    for change, name in names.items():
        words = f"changed {SET_BACK[change].removesuffix(' while')}"
        expect(findings[name], words, 1, change, file_of(site, name, change))
        assert [
            finding["message"].endswith(f"{when}: it was set back") for finding in findings[name]
        ] == [True], change
    assert set(statuses.values()) == {"activated"}
    assert findings.keys() == set(names.values())


@pytest.mark.parametrize("kind", [kind for kind, row in FINDINGS.items() if row[2] == 1][:1])
def test_findings_alone(cli, site, kind: str) -> None:
    """Where no plugin failed the exit code is 1."""
    site.plugin("acme", FINDINGS[kind][0])
    assert found(cli)[0] == 1


@pytest.mark.faults
@pytest.mark.parametrize("editable", [False, True])
@pytest.mark.parametrize("kind", ENDS)
def test_a_process_that_is_ended(request, site, alone, kind: str, editable: bool) -> None:
    """Its end is told of the one whose code did it; others, with a fault or none, are told of as ever."""
    source, words = ENDS[kind]
    if editable and kind in ("a hang", "a slow import", "too much memory"):
        pytest.skip("half a minute, for what other kinds tell too")
    site.plugin("acme", source)
    site.plugin("birch", f"import time\ntime.sleep(2)\n{PLUGIN.format('pass')}")
    site.plugin("cedar", "raise OSError('no driver')\n")
    if editable:
        origin = '{"url": "file:///x", "dir_info": {"editable": true}}'
        (site.folder / "acme-1.0.dist-info/direct_url.json").write_text(origin)
    # The memory of a warm interpreter is not that of the process which it is for.
    cli = request.getfixturevalue("cold_cli" if kind == "too much memory" else "cli")
    code, findings, statuses = found(cli, *LIMITS)
    assert code == 4
    file = f"{site.folder}/acme.py:" if kind in WITH_A_PLACE else ""
    expect(findings["acme"], words, 1 if kind == "a slow import" else 4, kind, file)
    expect(findings["cedar"], "OSError: no driver", 4, kind)
    assert findings.keys() == {"acme", "cedar"}
    assert (statuses["birch"], statuses["brix"], statuses["cedar"]) == (
        "activated",
        "activated",
        "failed",
    )
    quarantined = statuses["acme"] == "rejected"
    if quarantined:  # which in this process the other ones would not survive
        others_are_as_they_were(alone)
    assert quarantined == (not editable and kind not in ("a slow import", "an end by status 1"))


AT_EXIT = {
    "a hook that crashes": (
        "import atexit, os\natexit.register(os.abort)\n",
        "crashed the process with signal SIGABRT",
        4,
    ),
    "a hook that ends the process": (
        "import atexit, os\n@atexit.register\ndef end():\n    os._exit(3)\n",
        "ended the process with status 3",
        4,
    ),
    "a hook that never returns": (
        "import atexit, time\n@atexit.register\ndef end():\n    time.sleep(600)\n",
        "had not ended after 5 s: each command that loads the plugins ends without it then",
        1,
    ),
    "a hook that raises": (
        "import atexit\n@atexit.register\ndef end():\n    raise ValueError('x')\n",
        "raised ValueError: x: each command that loads the plugins prints this",
        1,
    ),
    "a destructor in C": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.__cxa_atexit(libc.abort, None, None)\n",
        "crashed the process with signal SIGABRT",
        4,
    ),
}
WITH_A_LINE = ("a hook that never returns", "a hook that raises")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.faults] * (name != "a hook that raises"))
        for name in AT_EXIT
    ],
)
def test_code_that_fails_at_exit(request, site, name: str) -> None:
    """The plugin works, and each command with it ends badly after its answer: one finding."""
    source, words, code = AT_EXIT[name]
    site.plugin("acme", source + kernel("RMSNorm", NATIVE))
    site.plugin("calm", kernel("QuickGELU", "return QuickGELU.forward_native(self, x)"))
    # A warm interpreter leaves the end of the process to the system, and runs no code in C then.
    cli = request.getfixturevalue("cli" if name == "a hook that raises" else "cold_cli")
    ended = cli("plugins", "doctor", "--json")
    report = json.loads(ended.stdout)
    (finding,) = report["findings"]
    assert f"code that runs when the process ends {words}" in finding["message"]
    assert "OPGRAFT_PLUGINS_DISABLE=acme goes without" in finding["message"]
    assert finding["provider"]["name"] == "acme"
    assert (finding["exit_code"], ended.returncode) == (code, code)
    assert [row["status"] for row in report["plugins"]] == ["activated"] * 2
    if name in WITH_A_LINE:
        assert finding["location"] == f"{site.folder / 'acme.py'}:4"
