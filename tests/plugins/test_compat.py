"""Which names of opgraft a plugin uses: told by its syntax tree, compared with listings of versions."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
from opgraft.errors import InputError
from opgraft.installed import version_of
from opgraft.plugins.api_use import uses_in
from opgraft.plugins.compat import Examination, examine
from opgraft.plugins.discovery import discover
from opgraft.plugins.listing import Listing, read_listing
from opgraft.version import __version__

REPOSITORY = Path(__file__).parents[2]
PLUGIN = """
raise SystemExit("it was imported")
import opgraft as host
from opgraft import ops, hookimpl
from opgraft.ops import RMSNorm as Norm
from opgraft.binding.functional import form
class Acme(Norm):
    def forward_oot(self, x, residual=None):
        return host.functional.rms_norm(x, eps=1e-6).abs()
class Brix(ops.SiluAndMul): pass
def register():
    Norm.register_oot(Acme, priority=3)
    import opgraft.specs.checks
@hookimpl(optionalhook=True)
def opgraft_veto(): ...
"""


@pytest.fixture
def here() -> Listing:
    return read_listing(__version__)


def examined(site, source: str, here: Listing, there: Listing | None = None) -> Examination:
    site.plugin("acme", source)
    return examine(discover().offers[-1:], here, there or here)


def changed(listing: Listing, *, without: str = "", **rows: dict) -> Listing:
    """The listing of a version to come."""
    names = {name: row for name, row in listing.names.items() if name != without}
    return Listing(
        "9.0",
        listing.modules,
        {**names, **{key.replace("__", "."): row for key, row in rows.items()}},
    )


def test_the_listing_is_what_the_code_has() -> None:
    """The committed file has each public name with its parameters, as the tool writes it."""
    spec = importlib.util.spec_from_file_location("public_api", REPOSITORY / "tools/public_api.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.FILE.read_text(encoding="utf-8") == tool.text(), "run 'make public-api'"


def test_names_are_found_by_whatever_they_are_called(site, here) -> None:
    """Aliases, attributes, calls, overridden methods and hooks count; each has its place, and nothing was imported."""
    found = examined(site, PLUGIN, here)
    assert found.unread == ()
    rows = {row.name: row for row in found.names}
    lines = {
        name: [int(place.rpartition(":")[2]) for place in row.locations]
        for name, row in rows.items()
    }
    assert lines["opgraft.ops.RMSNorm"] == [5]
    assert lines["opgraft.CustomOp.forward_oot"] == [8]
    assert lines["opgraft.functional.rms_norm"] == [9]
    assert lines["opgraft.CustomOp.register_oot"] == [12]
    assert lines["opgraft.ops.SiluAndMul"] == [10]
    assert lines["opgraft.plugins.hookspecs.opgraft_veto"] == [15]
    status = {name: row.status for name, row in rows.items() if row.status != "public"}
    assert status == {
        "opgraft.binding.functional.form": "deprecated",
        "opgraft.specs.checks": "deprecated",
    }
    assert rows["opgraft.specs.checks"].reason.startswith("import opgraft.testing.checks")


@pytest.mark.parametrize(
    ("source", "name", "status", "reason"),
    [
        (
            "from opgraft import CustomOpp",
            "opgraft.CustomOpp",
            "gone",
            "has no CustomOpp: did you mean 'CustomOp'",
        ),
        (
            "import opgraft.ops as o\no.RMSnorm",
            "opgraft.ops.RMSnorm",
            "gone",
            "did you mean 'RMSNorm'",
        ),
        (
            "import opgraft.nowhere",
            "opgraft.nowhere",
            "gone",
            "opgraft of opgraft .* has no nowhere",
        ),
        (
            "from opgraft.binding import marks",
            "opgraft.binding.marks",
            "private",
            "no part of the public API",
        ),
        (
            "import opgraft\nopgraft.rebind(deep=1)",
            "opgraft.rebind",
            "changed",
            "called with deep=, and takes .model",
        ),
        (
            "from opgraft.ops import RMSNorm\nRMSNorm.cuda(device=1)",
            "opgraft.ops.RMSNorm",
            "public",
            "^$",
        ),
    ],
)
def test_a_name_and_its_status(
    site, here, source: str, name: str, status: str, reason: str
) -> None:
    """What is not there is gone, with near names; what is not public is private; wrong keywords are a change."""
    row = next(
        row
        for row in examined(site, source, here).names
        if row.name == name and row.status == status
    )
    assert re.search(reason, row.reason)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("from opgraft import *\ndef register(cls):\n    rebind(cls)", 3),
        ("from opgraft.ops import RMSNorm\nnorm = RMSNorm(8)\nnorm.rebind(2)", 3),
        (
            "from opgraft import ops\nclass A(ops.RMSNorm):\n    def go(self): return self.rebind(2)",
            3,
        ),
        (
            "from opgraft.ops import RMSNorm\nclass A(RMSNorm):\n    def rebind(self, x): super().rebind(x)",
            3,
        ),
        ("import opgraft\ndef go(platform: opgraft.Platform):\n    platform.rebind()", 3),
    ],
)
def test_names_that_are_not_written_out_are_found(site, here, source: str, line: int) -> None:
    """What ``import *`` binds, and methods of instances, of ``self`` and of ``super()``, are uses of what has them."""
    members = {
        f"{cls}.rebind": {"signature": "(self, x)"}
        for cls in ("opgraft.ops.RMSNorm", "opgraft.Platform")
    }
    before = Listing(here.version, here.modules, {**here.names, **members})
    there = changed(here, without="opgraft.rebind")
    gone = [row for row in examined(site, source, before, there).names if row.status == "gone"]
    assert [place.rpartition(":")[2] for row in gone for place in row.locations] == [str(line)]
    assert gone[0].name.endswith(".rebind")


def test_attributes_of_its_own_are_none_of_ours(site, here) -> None:
    """A method that the class defines takes what it takes; a variable that is bound anew is no instance any more."""
    source = """
from opgraft.ops import *
class A(RMSNorm):
    def forward_native(self, x, residual=None, further=1): ...
    def go(self): return self.forward_native(x, further=2), self.weight, self.mine
norm = RMSNorm(8)
norm = open(norm.weight)
norm.read(further=3)
def f(RMSNorm): return RMSNorm.nothing
"""
    assert {row.status for row in examined(site, source, here).names} == {"public"}


def test_another_version(site, here) -> None:
    """Against another listing, names that it has not are gone, and those with other parameters have changed."""
    there = changed(
        here,
        without="opgraft.CustomOp.forward_oot",
        opgraft__functional__rms_norm={"signature": "(x, weight)", "since": "9.0"},
    )
    rows = {row.name: row for row in examined(site, PLUGIN, here, there).names}
    gone, other = rows["opgraft.CustomOp.forward_oot"], rows["opgraft.functional.rms_norm"]
    assert (gone.status, gone.reason) == ("gone", f"opgraft {__version__} has it, 9.0 has not")
    assert other.status == "changed"
    assert other.reason.endswith("and (x, weight) in 9.0")


@pytest.mark.parametrize(
    "source",
    ["def", "x = '\0'", "(" * 5000, "-" * 200_000, f"import opgraft\nopgraft{'.a' * 2000}"],
)
def test_what_cannot_be_read_is_named(site, here, source: str) -> None:
    """A file that is no Python ends nothing: it stands there with the reason."""
    ((file, reason),) = examined(site, source, here).unread
    assert file.endswith("acme.py")
    assert reason


def test_source_of_any_size_is_bounded(site, here) -> None:
    """A file of megabytes is not read."""
    ((_, reason),) = examined(site, "#" * (5 << 20), here).unread
    assert "larger than 4,194,304 bytes" in reason


def test_a_record_that_cannot_be_read_is_named(site, here) -> None:
    """A pipe in its place is not waited for, and the package of the entry point is examined all the same."""
    site.plugin("acme", PLUGIN)
    record = site.folder / "acme-1.0.dist-info/RECORD"
    record.unlink(missing_ok=True)
    os.mkfifo(record)
    found = examine(discover().offers[-1:], here, here)
    ((name, reason),) = found.unread
    assert (name, "RECORD cannot be read: it is no regular file" in reason) == (
        "RECORD of acme 1.0",
        True,
    )
    assert found.names


def test_a_relative_import_is_none_of_ours() -> None:
    """``from .opgraft import x`` and names that only begin alike are other packages."""
    assert (
        uses_in(
            b"from .opgraft import x\nimport opgraft_toy\nfrom opgraft_toy import ops\nops.a", {}
        )
        == []
    )


@pytest.mark.parametrize(
    "function", ["def f(ops): return ops.own", "def f():\n    ops = g()\n    return ops.own"]
)
def test_a_name_that_a_function_binds_is_its_own(function: str) -> None:
    """A parameter or a variable called as an import is none of ours there, and elsewhere the import counts."""
    found = uses_in(f"from opgraft import ops\n{function}\nops.RMSNorm".encode(), {})
    assert [use.name for use in found] == ["opgraft.ops", "opgraft.ops.RMSNorm"]


def test_the_command(cli, site, tmp_path: Path, here) -> None:
    """The table, a line for each finding with its places, counts and the exit code; listings by version or file."""
    site.plugin("acme", PLUGIN)
    shown = cli("plugins", "compat", "acme")
    assert shown.returncode == 0, shown.stderr
    assert "deprecated: opgraft.specs.checks at " in shown.stdout
    assert shown.stdout.splitlines()[-1].startswith(
        f"acme 1.0 uses names of opgraft {__version__}: "
    )
    there = changed(here, without="opgraft.functional.rms_norm")
    listing = {
        "schema": "opgraft.api/1",
        "version": "9.0",
        "modules": [*there.modules],
        "names": there.names,
    }
    (tmp_path / "next.json").write_text(json.dumps(listing))
    result = cli("plugins", "compat", "acme", "--against", "next.json", "--json")
    assert result.returncode == 1
    found = {row["name"]: row["status"] for row in json.loads(result.stdout)["names"]}
    assert found["opgraft.functional.rms_norm"] == "gone"
    assert "it was imported" not in shown.stderr + result.stderr


REQUIRED = {
    ("opgraft>=0.1", "torch>=2"): (0, ["met: opgraft>=0.1 by {own}", "met: torch>=2 by {torch}"]),
    ("opgraft>=9", "torch>=2"): (
        1,
        ["unmet: it requires 'opgraft>=9', this is opgraft {own}: install one of them"],
    ),
    ("opgraft>=0.1,<9", "torch>=99"): (
        1,
        ["met: opgraft", "unmet: it requires 'torch>=99', this is torch {torch}: "],
    ),
    ("opgraft=>1",): (1, ["unmet: its requirement 'opgraft=>1' is malformed"]),
    ("opgraft>=9; extra == 'more'", "numpy"): (0, ["it requires no version of opgraft or torch"]),
}


@pytest.mark.parametrize("requires", REQUIRED, ids=" ".join)
def test_requirements_on_versions(cli, site, requires: tuple[str, ...]) -> None:
    """Each that applies is compared with the version there is; one that does not fit is a finding."""
    site.plugin("acme", PLUGIN, requires=requires)
    code, lines = REQUIRED[requires]
    shown = cli("plugins", "compat", "acme")
    assert shown.returncode == code, shown.stderr
    for line in lines:
        assert f"\n{line.format(own=__version__, torch=version_of('torch'))}" in shown.stdout


def test_requirements_on_another_version(site, cli, tmp_path: Path, here) -> None:
    """The range of opgraft is compared with the version that is asked about, that of torch with the installed one."""
    site.plugin("acme", PLUGIN, requires=["opgraft<9", "torch>=2"])
    listing = {
        "schema": "opgraft.api/1",
        "version": "9.0",
        "modules": [*here.modules],
        "names": here.names,
    }
    (tmp_path / "next.json").write_text(json.dumps(listing))
    result = cli("plugins", "compat", "acme", "--against", "next.json", "--json")
    host, torch = json.loads(result.stdout)["requirements"]
    told = "it requires 'opgraft<9', asked about is opgraft 9.0: install one of them that fits"
    assert host == {"requirement": "opgraft<9", "version": "9.0", "reason": told}
    assert torch == {"requirement": "torch>=2", "version": version_of("torch"), "reason": ""}
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("version", "message"), [("7.7", "is kept: known: 0.1.0"), ("none.json", "is no listing")]
)
def test_a_listing_that_is_not_there(version: str, message: str) -> None:
    """A version of which none is kept, and a file that cannot be read, are errors that say so."""
    with pytest.raises(InputError, match=message):
        read_listing(version)


OTHER = {
    "schema": "opgraft.api/1",
    "version": "9.0",
    "modules": ["opgraft"],
    "names": {"opgraft.ops": {}},
}


@pytest.mark.parametrize(
    "data",
    [
        {**OTHER, "schema": "other/1"},
        [OTHER],
        {**OTHER, "modules": 5},
        {**OTHER, "names": [5]},
        *(
            {**OTHER, "names": {"opgraft.CustomOp": row}}
            for row in (
                5,
                {"bases": 5},
                {"bases": [5]},
                {"is": "opgraft.gone"},
                {"deprecated": 5},
                {"signature": "(a"},
            )
        ),
    ],
)
def test_a_listing_of_another_form(tmp_path: Path, data: object) -> None:
    """A file of another schema, and one with rows that no tool has written, are refused."""
    (tmp_path / "x.json").write_text(json.dumps(OTHER))
    assert read_listing(str(tmp_path / "x.json")).version == "9.0"
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="is no listing of the schema"):
        read_listing(str(tmp_path / "x.json"))


def test_a_listing_that_is_a_pipe(tmp_path: Path) -> None:
    """It is refused, and not waited for."""
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(InputError, match="it is no regular file"):
        read_listing(str(tmp_path / "x.json"))
