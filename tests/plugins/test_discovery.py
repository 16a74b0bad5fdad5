"""Finding installed platforms and plugins by their metadata alone."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import opgraft
import pytest
from opgraft.config import resolve
from opgraft.config.environment import SIMULATED_DEVICE
from opgraft.plugins.admission import objection
from opgraft.plugins.discovery import PLATFORM_GROUP, PLUGIN_GROUP, discover
from opgraft.registry.decision import Provider


def test_nothing_is_imported_by_discovery(site) -> None:
    """A plugin that would fail at import is discovered all the same."""
    site.plugin("acme-ops", "raise RuntimeError('imported')", version="2.1")
    (offer,) = discover().of_group(PLUGIN_GROUP)
    assert (offer.name, offer.provider) == ("acme_ops", Provider("acme-ops", "2.1"))
    assert "acme_ops" not in sys.modules


def test_the_built_in_platforms_are_entry_points_like_any(site) -> None:
    """The platforms of opgraft are found through its own metadata."""
    built_in = [offer.name for offer in discover().of_group(PLATFORM_GROUP) if offer.built_in]
    assert sorted(built_in) == ["cpu", "cuda", "rocm", "tpu", "xpu"]


def test_one_scan_per_process(site) -> None:
    """A distribution that is installed later is seen after reset only."""
    before = discover()
    site.plugin("late", "")
    assert discover() is before
    opgraft.reset()
    assert [offer.name for offer in discover().of_group(PLUGIN_GROUP)] == ["late"]


@pytest.mark.parametrize(
    "text",
    [
        "[opgraft.plugins]\nbroken",
        "[opgraft.plugins]\nbroken = not a module",
        "[opgraft.plugins]\nbro ken! = module",
        "[opgraft.plugins]\nbroken =",
    ],
)
def test_malformed_metadata_is_a_recorded_problem_and_the_rest_goes_on(
    site, caplog, text: str
) -> None:
    """One distribution with a broken entry_points.txt hides no other, and is reported once."""
    site.install("broken-dist", {}, text)
    site.plugin("good", "")
    with caplog.at_level(logging.WARNING, logger="opgraft"):
        found = discover()
        discover()
    assert [offer.name for offer in found.of_group(PLUGIN_GROUP)] == ["good"]
    assert [problem.provider.name for problem in found.problems] == ["broken-dist"]
    assert len([record for record in caplog.records if "broken-dist" in record.message]) == 1


def test_metadata_that_cannot_even_be_decoded_or_lacks_its_name(site) -> None:
    """Bytes that are no text, and a dist-info folder without METADATA, are problems too."""
    site.install("garbage", {}, "x")
    (site.folder / "garbage-1.0.dist-info/entry_points.txt").write_bytes(
        b"[opgraft.plugins]\n\xff\xfe = x"
    )
    site.plugin("nameless", "")
    (site.folder / "nameless-1.0.dist-info/METADATA").unlink()
    assert discover().of_group(PLUGIN_GROUP) == []
    assert len(discover().problems) == 2


def test_a_name_that_is_taken_is_a_problem(site) -> None:
    """Two distributions with one entry-point name: the second is left out and the message names both."""
    site.install("one", {"one.py": ""}, {"opgraft.plugins": ["acme = one"]})
    site.install("two", {"two.py": ""}, {"opgraft.plugins": ["acme = two"]})
    (problem,) = discover().problems
    assert {problem.provider.name} | {discover().of_group(PLUGIN_GROUP)[0].provider.name} == {
        "one",
        "two",
    }
    assert "'acme' in opgraft.plugins is already provided by" in problem.reason


def test_a_plugin_that_settings_could_not_choose_is_a_problem(site) -> None:
    """``providers`` means an op's native definition by ``native``: no plugin of that name is admitted."""
    site.install("acme", {"acme.py": ""}, {"opgraft.plugins": ["native = acme", "acme = acme"]})
    (problem,) = discover().problems
    assert [offer.name for offer in discover().of_group(PLUGIN_GROUP)] == ["acme"]
    assert problem.provider == Provider("acme", "1.0")
    assert (
        "'native' in opgraft.plugins could not be chosen by the setting providers" in problem.reason
    )
    assert "give it another name" in problem.reason


def test_a_built_in_platform_cannot_be_shadowed(site) -> None:
    """A third party that calls its platform cpu does not take the place of ours."""
    site.install("impostor", {"impostor.py": ""}, {"opgraft.platforms": ["cpu = impostor:SPEC"]})
    (cpu,) = (offer for offer in discover().of_group(PLATFORM_GROUP) if offer.name == "cpu")
    assert cpu.built_in


def test_the_simulated_platform_is_one(site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is offered where its variable is set; another of its name is a problem then, and is told of."""
    site.install(
        "impostor", {"impostor.py": ""}, {"opgraft.platforms": ["simulated = impostor:SPEC"]}
    )
    monkeypatch.setenv(SIMULATED_DEVICE, "default")
    (simulated,) = (
        offer for offer in discover().of_group(PLATFORM_GROUP) if offer.name == "simulated"
    )
    (problem,) = discover().problems
    assert simulated.built_in
    assert "'simulated' in opgraft.platforms is already provided by opgraft" in problem.reason


def test_an_older_copy_further_down_the_path_is_ignored(site, tmp_path, monkeypatch) -> None:
    """The first distribution of a name counts, as it does for imports."""
    site.plugin("acme", "", version="2.0")
    older = type(site)(tmp_path / "older")
    older.folder.mkdir()
    older.plugin("acme", "", version="1.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(older.folder)])
    assert [offer.provider.version for offer in discover().of_group(PLUGIN_GROUP)] == ["2.0"]


def test_providers_of_modules(site) -> None:
    """A module belongs to its distribution where that is known, else to its top-level package."""
    site.plugin("acme-ops", "")
    assert discover().provider_of("acme_ops.kernels") == Provider("acme-ops", "1.0")
    assert discover().provider_of("opgraft.ops.layernorm") == Provider(
        "opgraft", opgraft.__version__
    )
    assert str(discover().provider_of("elsewhere.module")) == "elsewhere"


def stale_metadata(folder: Path, platforms: str) -> None:
    """What an old build of opgraft leaves in a working folder."""
    info = folder / "opgraft.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: opgraft\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(f"[opgraft.platforms]\n{platforms}")


def test_stale_metadata_in_the_working_folder_hides_nothing(cli, tmp_path: Path) -> None:
    """An egg-info of another time neither takes platforms away nor brings back those that are gone."""
    stale_metadata(
        tmp_path, "cpu = opgraft.platforms.cpu:OLD\ngone = opgraft.platforms.gone:SPEC\n"
    )
    result = cli("detect", "--json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert sorted(c["name"] for c in data["decision"]["candidates"]) == [
        "cpu",
        "cuda",
        "rocm",
        "tpu",
        "xpu",
    ]
    assert data["problems"] == []
    assert {c["provider"]["version"] for c in data["decision"]["candidates"]} == {
        opgraft.__version__
    }


@pytest.mark.parametrize("name", ["opgraft", "OpGraft"])
@pytest.mark.parametrize(
    "point", ["cpu = evil:SPEC", "evil = evil:SPEC", "evil = opgraft_platforms_evil:SPEC"]
)
def test_an_impostor_is_not_built_in(site, cli, tmp_path: Path, name: str, point: str) -> None:
    """Whoever calls itself opgraft gets no probe run, neither here nor in a child, and is reported."""
    trace = tmp_path / "ran"
    source = f"open({str(trace)!r}, 'w').close()\nSPEC = None\n"
    modules = {"evil.py": source, "opgraft_platforms_evil.py": source}
    site.install(
        name,
        modules,
        {"opgraft.platforms": [point], "opgraft.plugins": ["evil = evil"]},
        version="9.0",
    )
    result = cli("detect", "--json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert sorted(c["name"] for c in data["decision"]["candidates"]) == [
        "cpu",
        "cuda",
        "rocm",
        "tpu",
        "xpu",
    ]
    (problem,) = data["problems"]
    assert str(site.folder) in problem["provider"]["name"]
    assert "calls itself opgraft" in problem["reason"]
    assert cli("plugins", "doctor").returncode == 1
    assert not trace.exists()


@pytest.mark.parametrize(
    "line",
    [
        "Opgraft>=9",
        "OPGRAFT >= 9",
        "opgraft (>=9)",
        "opgraft[demo]>=9",
        "opgraft>=9; python_version>'3'",
    ],
)
def test_a_requirement_counts_however_it_is_spelled(site, line: str) -> None:
    """Names of distributions have many spellings, and a version that does not fit is a reason in each."""
    site.plugin("acme", "raise RuntimeError('imported')", requires=["torch", line])
    (offer,) = discover().of_group(PLUGIN_GROUP)
    assert offer.requires == ("torch", line)
    assert "it requires" in (objection(offer, resolve([])) or "")


def test_other_distributions_names_begin_alike(site) -> None:
    """A requirement on opgraft-something says nothing about opgraft."""
    site.plugin("acme", "", requires=["opgraft-toy-npu>=9", "opgraft_cpu_kernels", "opgraft.x>=9"])
    assert discover().of_group(PLUGIN_GROUP)[0].requires == ()


def test_a_torch_without_metadata(site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells its version before it is imported: the requirement rejects nobody."""
    site.plugin("acme", "", requires=["torch>=99"])
    (offer,) = discover().of_group(PLUGIN_GROUP)
    assert "it requires 'torch>=99'" in str(objection(offer, resolve([])))
    monkeypatch.setattr("sys.path", [str(site.folder)])
    assert objection(offer, resolve([])) is None
