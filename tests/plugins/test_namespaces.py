"""Distributions of one vendor that share a package: each module is of the one that brings it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import opgraft
import pytest
from opgraft import OpgraftConfig, set_config
from opgraft.ops import GELU, RMSNorm
from opgraft.plugins.discovery import discover
from opgraft.registry.state import host_state

PLUGIN = """
from opgraft.ops import {op}
platforms = "any"
class {name}({op}):
    def forward_oot(self, *args, **kwargs):
        return self.forward_native(*args, **kwargs)
{op}.register_oot({name})
"""


@pytest.fixture
def both(site) -> Iterator[None]:
    """Two distributions with modules in one package without a file, which is forgotten afterwards."""
    for name, op in (("npu", "RMSNorm"), ("gpu", "GELU")):
        files = {
            f"vendor/{name}.py": PLUGIN.format(op=op, name=name.title()),
            f"vendor/{name}_kernels.py": "",
        }
        site.install(f"acme-{name}", files, {"opgraft.plugins": [f"{name} = vendor.{name}"]})
    yield
    sys.modules.pop("vendor", None)


@pytest.mark.parametrize("order", [("npu", "gpu"), ("gpu", "npu")])
@pytest.mark.parametrize("denied", [None, "npu", "gpu"])
def test_who_is_imported_first_decides_nothing(
    both, order: tuple[str, str], denied: str | None
) -> None:
    """Each replaces its op unless it is denied, whatever becomes of the other."""
    for name in order:
        importlib.import_module(f"vendor.{name}")
    opgraft.reset()
    with set_config(OpgraftConfig(plugins_disable=[denied] if denied else [])):
        opgraft.load_plugins()
        statuses = {name: record.status.value for name, record in host_state().plugins.items()}
        assert statuses == {
            name: "rejected" if name == denied else "activated" for name in ("npu", "gpu")
        }
        for name, op in (("npu", RMSNorm(4)), ("gpu", GELU())):
            expected = "opgraft" if name == denied else f"acme-{name}"
            assert op.binding.provider.name == expected


def test_a_module_is_of_who_lists_it(both) -> None:
    """Also one that no entry point names."""
    for name in ("npu", "gpu"):
        for module in (f"vendor.{name}", f"vendor.{name}_kernels"):
            assert discover().provider_of(module).name == f"acme-{name}"
