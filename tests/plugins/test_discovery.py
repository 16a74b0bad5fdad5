"""Finding installed platforms and plugins by their metadata alone."""

from __future__ import annotations

import logging
import sys

import opgraft
import pytest
from opgraft.decision import Provider
from opgraft.plugins.discovery import PLATFORM_GROUP, PLUGIN_GROUP, discover


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
def test_malformed_metadata_is_a_recorded_problem_and_the_rest_goes_on(site, caplog, text: str) -> None:
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
    (site.folder / "garbage-1.0.dist-info/entry_points.txt").write_bytes(b"[opgraft.plugins]\n\xff\xfe = x")
    site.plugin("nameless", "")
    (site.folder / "nameless-1.0.dist-info/METADATA").unlink()
    assert discover().of_group(PLUGIN_GROUP) == []
    assert len(discover().problems) == 2


def test_a_name_that_is_taken_is_a_problem(site) -> None:
    """Two distributions with one entry-point name: the second is left out and the message names both."""
    site.install("one", {"one.py": ""}, {"opgraft.plugins": ["acme = one"]})
    site.install("two", {"two.py": ""}, {"opgraft.plugins": ["acme = two"]})
    (problem,) = discover().problems
    assert {problem.provider.name} | {discover().of_group(PLUGIN_GROUP)[0].provider.name} == {"one", "two"}
    assert "'acme' in opgraft.plugins is already provided by" in problem.reason


def test_a_built_in_platform_cannot_be_shadowed(site) -> None:
    """A third party that calls its platform cpu does not take the place of ours."""
    site.install("impostor", {"impostor.py": ""}, {"opgraft.platforms": ["cpu = impostor:SPEC"]})
    (cpu,) = (offer for offer in discover().of_group(PLATFORM_GROUP) if offer.name == "cpu")
    assert cpu.built_in


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
    assert discover().provider_of("opgraft.ops.layernorm") == Provider("opgraft", opgraft.__version__)
    assert str(discover().provider_of("elsewhere.module")) == "elsewhere"
