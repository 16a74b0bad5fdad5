"""A provider that is asked for and that nothing of is active: the error says why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from conftest import Site
from opgraft import set_config
from opgraft.config import OpgraftConfig
from opgraft.distributed import Communicator
from opgraft.errors import ConfigError
from opgraft.ops import RMSNorm
from opgraft.plugins import quarantine
from opgraft.registry.decision import Provider

PLUGIN = """
import opgraft
from opgraft.ops import RMSNorm
platforms = "any"
@opgraft.hookimpl
def opgraft_register_ops():
    RMSNorm.register_oot(type("Acme", (RMSNorm,), {"forward_oot": RMSNorm.forward_native}))
"""


def locked_out(site: Site) -> dict[str, object]:
    (site.folder / "empty.lock").write_text('{"schema": "opgraft.lock/2", "distributions": []}')
    return {"lockfile": str(site.folder / "empty.lock")}


def denied(site: Site) -> dict[str, object]:
    return {"plugins_disable": ["acme"]}


def quarantined(site: Site) -> dict[str, object]:
    quarantine.confine(Provider("acme-dist", "1.0"), "it crashed")
    return {}


def unfit(site: Site) -> dict[str, object]:
    metadata = site.folder / "acme_dist-1.0.dist-info/METADATA"
    metadata.write_text(
        metadata.read_text().replace("Requires-Dist: opgraft", "Requires-Dist: opgraft>=99")
    )
    return {}


def failing(site: Site) -> dict[str, object]:
    (site.folder / "acme.py").write_text("raise OSError('no\\x1b[31mdriver')")
    return {}


def elsewhere(site: Site) -> dict[str, object]:
    (site.folder / "acme.py").write_text(PLUGIN.replace('"any"', '("tpu",)'))
    return {}


WAYS: dict[Callable[[Site], dict[str, object]], str] = {
    locked_out: r"rejected: locked out by lockfile .*it is not in .*empty\.lock: 'opgraft plugins lock' adds it",
    denied: r"rejected: on the deny list plugins_disable \(a block\)",
    quarantined: r"rejected: in quarantine since .*it crashed; 'opgraft plugins doctor --no-cache' tries it again",
    unfit: r"rejected: it requires 'opgraft>=99', this is opgraft",
    failing: r"failed: while it was loaded: OSError: no\\x1b\[31mdriver",
    elsewhere: r"rejected: applies on tpu only, this process runs on cpu",
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ["acme", "acme-dist"])
def test_the_error_says_why_it_is_not_there(
    site, way: Callable[[Site], dict[str, object]], name: str
) -> None:
    """Whether it is asked for by its plugin's or its distribution's name; the reason has the next step."""
    site.install("acme-dist", {"acme.py": PLUGIN}, {"opgraft.plugins": ["acme = acme"]})
    settings = way(site)
    config = OpgraftConfig(**settings, providers=f"rms_norm={name}")
    with set_config(config, origin="a block"), pytest.raises(ConfigError) as caught:
        RMSNorm(8)
    told = str(caught.value)
    assert told.startswith(
        f"providers asks for '{name}' for 'rms_norm' (a block), which has no replacement of RMSNorm"
    )
    assert re.search(rf"on cpu, as plugin acme of acme-dist 1\.0 is {WAYS[way]}", told)
    assert re.search(
        r"[^.]\. Mend that, or choose another \(active: none; .opgraft. keeps the op.s own class",
        told,
    )


def test_one_that_is_active_and_has_no_such_op(site) -> None:
    """Nothing is said against it; the same for classes that are no ops."""
    site.plugin("acme", PLUGIN)
    with (
        set_config(OpgraftConfig(providers="communicator=acme")),
        pytest.raises(
            ConfigError, match=r"no replacement of Communicator that applies on cpu \(active: none"
        ),
    ):
        Communicator()
