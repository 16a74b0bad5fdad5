"""The doctor names each fault that is planted, with whose it is, and what is in order stays as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from faults.doctor_rows import ENDS, FINDINGS, POINTS
from faults.planting import GOOD

LIMITS = ("--time-limit", "20", "--memory-limit", "2.5")


def found(cli, *arguments: str) -> tuple[int, dict[str, list[dict[str, Any]]], dict[str, str]]:
    """The exit code of the doctor, what it finds by distribution, and what became of each plugin."""
    ended = cli("plugins", "doctor", "--json", *arguments)
    report = json.loads(ended.stdout)
    findings: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        findings.setdefault((finding["provider"] or {"name": ""})["name"], []).append(finding)
    return ended.returncode, findings, {row["name"]: row["status"] for row in report["plugins"]}


def expect(findings: list[dict[str, Any]], words: str, code: int, kind: str) -> None:
    told = [(finding["message"], finding["exit_code"]) for finding in findings]
    assert any(words in message and end == code for message, end in told), f"{kind}: {told}"


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
            name, {"acme_points.py": "" if "platform" in group else "import opgraft\n"}, {group: [f"{name} = {value}"]}
        )
    code, findings, statuses = found(cli)
    assert code == 4
    for kind, name in names.items():
        expect(findings[name], FINDINGS[kind][1], FINDINGS[kind][2], kind)
    for kind, name in points.items():
        expect(findings[name], POINTS[kind][2], 4 if POINTS[kind][0] == "opgraft.plugins" else 1, kind)
    assert statuses["brix"] == "activated"
    assert not findings.keys() - {*names.values(), *points.values()}


@pytest.mark.parametrize("kind", [kind for kind, row in FINDINGS.items() if row[2] == 1][:1])
def test_findings_alone(cli, site, kind: str) -> None:
    """Where no plugin failed the exit code is 1."""
    site.plugin("acme", FINDINGS[kind][0])
    assert found(cli)[0] == 1


@pytest.mark.faults
@pytest.mark.parametrize("editable", [False, True])
@pytest.mark.parametrize("kind", ENDS)
def test_a_process_that_is_ended(cli, site, kind: str, editable: bool) -> None:
    """Its end is told of the one whose code did it; others, with a fault or none, are told of as ever."""
    source, words = ENDS[kind]
    if editable and kind in ("a hang", "a slow import", "too much memory"):
        pytest.skip("half a minute, for what other kinds tell too")
    site.plugin("acme", source)
    site.plugin("brix", "import time\ntime.sleep(2)\n" + GOOD)
    site.plugin("cedar", "raise OSError('no driver')\n")
    if editable:
        origin = '{"url": "file:///x", "dir_info": {"editable": true}}'
        (site.folder / "acme-1.0.dist-info/direct_url.json").write_text(origin)
    code, findings, statuses = found(cli, *LIMITS)
    assert code == 4
    expect(findings["acme"], words, 1 if kind == "a slow import" else 4, kind)
    expect(findings["cedar"], "OSError: no driver", 4, kind)
    assert findings.keys() == {"acme", "cedar"}
    assert (statuses["brix"], statuses["cedar"]) == ("activated", "failed")
    quarantined = statuses["acme"] == "rejected"
    assert quarantined == (not editable and kind not in ("a slow import", "an end by status 1"))
