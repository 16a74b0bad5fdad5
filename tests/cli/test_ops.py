"""What 'opgraft ops' claims is what really runs: kernels, variants, functions and places."""

from __future__ import annotations

import importlib
import json
from functools import reduce
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft import functional, ops
from opgraft.binding.functional import register_functional, unregister
from opgraft.ops import CustomOp, Linear, RMSNorm, RotaryEmbedding
from opgraft.platforms.cpu.platform import CpuPlatform
from opgraft.plugins.host import load_plugins
from opgraft.testing import inventory

PLUGIN = """
import opgraft
from opgraft.ops import RotaryEmbedding
platforms = "any"
def marked(function):
    return function
class AcmeRotary(RotaryEmbedding):
    @marked
    @opgraft.inference_only
    def forward_oot(self, positions, query, key=None):
        return RotaryEmbedding.forward_native(self, positions, query, key)
@opgraft.hookimpl
def opgraft_register_ops():
    RotaryEmbedding.register_oot(AcmeRotary)
"""


def test_a_replaced_variant_is_listed_under_its_op(cli, site) -> None:
    """Where RotaryEmbedding is replaced, list and explain of rotary_embedding say so, as text and as JSON."""
    site.plugin("acme", PLUGIN)
    row = next(
        r
        for r in json.loads(cli("ops", "list", "--json").stdout)["ops"]
        if r["op"] == "rotary_embedding"
    )
    variants = {variant["target"]: variant for variant in row["variants"]}
    assert (row["class"], row["key"]) == ("RotaryEmbeddingBase", "native")
    assert variants["RotaryEmbedding"]["kernel"] == "AcmeRotary.forward_oot"
    assert variants["RotaryEmbedding"]["provider"] == {"name": "acme", "version": "1.0"}
    assert variants["MRotaryEmbedding"]["key"] == "native"
    assert "  rotary_embedding" in cli("ops", "list").stdout
    text = cli("ops", "explain", "rotary_embedding").stdout
    assert "  the variant RotaryEmbedding gets AcmeRotary.forward_oot of acme 1.0\n" in text


@pytest.mark.parametrize(
    "name", ["AcmeRotary", "AcmeRotary.forward_oot", "acme:AcmeRotary", "RotaryEmbedding"]
)
def test_a_replacement_is_known_by_the_name_that_tables_show(cli, site, name: str) -> None:
    """The decision is that of the class that it replaces; the kernel's place is its def line, not a decorator's."""
    site.plugin("acme", PLUGIN)
    answer = json.loads(cli("ops", "explain", name, "--json").stdout)
    assert answer["target"] == "RotaryEmbedding"
    winner = answer["decision"]["candidates"][0]
    lines = (site.folder / "acme.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "def forward_oot" in line)
    assert winner["location"] == f"{site.folder / 'acme.py'}:{number}"


def test_kernels_that_are_told_are_those_that_ops_are_bound_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For each class that can be built without arguments, or with a size, the instance's decision is the row."""
    load_plugins()
    built = 0
    for cls in CustomOp.op_registry.values():
        try:
            op = cls()
        except TypeError:
            continue
        row = inventory.kernel_here(cls)
        assert (row.kernel, row.op_class) == (op.decision.chosen, op.op_class.__qualname__)
        built += 1
    assert built > 10


def test_who_provides_a_kernel_is_who_defines_it(cli, site) -> None:
    """A replacement whose kernel is switched off runs opgraft's native definition, which is not the plugin's."""
    site.plugin("acme", PLUGIN)
    rows = json.loads(
        cli("ops", "list", "--json", "--compilation_config.custom_ops", "none").stdout
    )["ops"]
    variants = next(row["variants"] for row in rows if row["op"] == "rotary_embedding")
    row = next(variant for variant in variants if variant["target"] == "RotaryEmbedding")
    assert (row["class"], row["enabled"]) == ("AcmeRotary", False)
    assert row["provider"]["name"] == "opgraft"


def resolved(path: str) -> object:
    """What a dotted path names: the longest part that is a module, and attributes of it."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            return reduce(getattr, parts[end:], importlib.import_module(".".join(parts[:end])))
        except ModuleNotFoundError:
            continue
    raise AssertionError(f"{path} names nothing")


def test_functions_that_explain_names_exist() -> None:
    """Every path by which a form is said to be called, and every function that it is said to run, is there."""
    told = {
        found.name: found
        for cls in CustomOp.op_registry.values()
        for found in inventory.forms_here(cls)
    }
    assert set(functional.__all__) <= set(told)
    for found in told.values():
        assert callable(resolved(found.call)), found
        assert callable(resolved(found.function)), found
        file, _, line = found.location.rpartition(":")
        assert (
            found.function.rpartition(".")[2] in Path(file).read_text().splitlines()[int(line) - 1]
        ), found


def test_a_form_of_a_plugin_is_not_said_to_be_in_opgraft_functional() -> None:
    """A form that opgraft.functional does not have is shown by the path that torch has for it."""

    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @register_functional(op="rms_norm", fake=fake)
    def norm_of_a_plugin(x: torch.Tensor) -> torch.Tensor:
        return x

    try:
        (call,) = [
            found.call
            for found in inventory.forms_here(RMSNorm)
            if found.name == "norm_of_a_plugin"
        ]
        assert call == "torch.ops.opgraft.norm_of_a_plugin"
        assert callable(resolved(call))
    finally:
        unregister(norm_of_a_plugin)


def test_the_form_of_a_variant_runs_what_the_variant_is_bound_to() -> None:
    """mrope, a form of MRotaryEmbedding, is told by that class's kernel, not by that of the op's own class."""

    def turned(*arguments: object) -> None:
        raise AssertionError("not called")

    class Fast(ops.MRotaryEmbedding):
        def forward_oot(self, positions, query, key=None, offsets=None):
            return query, key

    Fast.functional_oot = {"mrope": turned}
    ops.MRotaryEmbedding.register_oot(Fast)
    here = {found.name: found.function for found in inventory.forms_here(ops.RotaryEmbeddingBase)}
    assert here["mrope"].endswith("turned")
    assert not here["rotary_embedding"].endswith("turned")


def test_why_nothing_is_packed_is_what_the_platform_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform that names no instruction sets is blamed, not a CPU that the same decision shows to have them."""
    real = CpuPlatform().capability()
    stated = opgraft.DeviceCapability(real.name, real.dtypes, features=("t1",))
    monkeypatch.setattr(CpuPlatform, "capability", lambda self, index=0: stated)
    reason = str(Linear(8, 8).decision)
    if "was measured with" in reason:  # else oneDNN is not there at all
        assert "Platform.capability().features of cpu lists t1" in reason
        assert "this one has none" not in reason


def test_details_are_there_on_request(cli) -> None:
    """With --details the kernels of every platform and the proof of each op follow; without, they do not."""
    assert "native definition proved" not in cli("ops", "list").stdout
    text = cli("ops", "list", "--details").stdout
    assert "  kernels of RotaryEmbedding: cpu=native cuda=cuda" in text
    for name, cls in CustomOp.op_registry.items():
        words = inventory.proofs_in_words(cls, inventory.proofs_of(inventory.functionals_of(cls)))
        assert f"  {words}\n" in text, name


def test_rotary_embedding_itself_is_a_variant() -> None:
    """The class that models construct by the name RotaryEmbedding is one of the variants of its op."""
    assert RotaryEmbedding in inventory.variants_of(ops.RotaryEmbeddingBase)


def test_a_class_of_a_plugin_that_is_not_active(cli, site) -> None:
    """Its name is not known, which is told with the plugin and the reason; the list of ops is named."""
    site.platform(
        "kiwi", probe="return Evidence(False, 'unplugged')", plugin="raise RuntimeError\n"
    )
    result = cli("ops", "explain", "KiwiRMSNorm")
    assert result.returncode == 2
    assert "did you mean 'RMSNorm'" in result.stderr
    assert "'opgraft ops list' shows the names of all" in result.stderr
    assert "plugin kiwi of kiwi-dist 1.0 is rejected: applies on kiwi only" in result.stderr
    assert "opgraft detect --all" in cli("plugins", "doctor").stdout
