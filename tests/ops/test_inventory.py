"""What 'opgraft ops list' and the op pages tell of each op: kernels on every platform, and the proofs."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import ClassVar

import opgraft
import pytest
import torch
from opgraft import CustomOp, ops
from opgraft.binding.names import op_name_of
from opgraft.errors import ConflictError
from opgraft.ops import MLP, GatedMLP, RMSNorm, SiluAndMul
from opgraft.plugins.host import load_plugins
from opgraft.registry.state import host_state
from opgraft.testing import inventory, proof_records
from opgraft.testing.inventory import DeclaredPlatform

REPOSITORY = Path(__file__).parents[2]
BUILT_IN = ["cpu", "cuda", "rocm", "tpu", "xpu"]


def keys_of(cls: type) -> dict[str, str | None]:
    load_plugins()
    return inventory.kernel_keys(cls, inventory.declared_platforms())


def reasons() -> dict[str, str]:
    """Why the kernels of platforms are not known."""
    return {p.name: p.unknown for p in inventory.declared_platforms()}


def make_op(*keys: str) -> type[CustomOp]:
    """An op with a native definition and kernels for some keys."""

    def forward(self: CustomOp, x: torch.Tensor) -> torch.Tensor:
        return x

    return type("Made", (CustomOp,), {f"forward_{key}": forward for key in ("native", *keys)})


def test_the_chains_are_those_of_the_platform_classes() -> None:
    """The built-in platforms are all there, with the chains that they have on a machine with the device."""
    chains = {p.name: p.chain for p in inventory.declared_platforms()}
    assert list(chains) == BUILT_IN
    assert chains["rocm"] == ("oot", "hip", "cuda", "native")
    assert [p.name for p in inventory.built_in_platforms()] == BUILT_IN


@pytest.mark.parametrize(
    ("defined", "expected"),
    [
        ((), dict.fromkeys(BUILT_IN, "native")),
        (
            ("cuda",),
            {"cpu": "native", "cuda": "cuda", "rocm": "cuda", "tpu": "native", "xpu": "native"},
        ),
        (
            ("cuda", "hip", "cpu"),
            {"cpu": "cpu", "cuda": "cuda", "rocm": "hip", "tpu": "native", "xpu": "native"},
        ),
    ],
)
def test_each_platform_has_the_first_kernel_of_its_chain(
    defined: tuple[str, ...], expected: dict[str, str]
) -> None:
    """By platform, the key is that of the kernel that would be bound there."""
    assert keys_of(make_op(*defined)) == expected


def test_what_a_kernel_needs_counts_as_present() -> None:
    """A kernel that cannot run on this machine is listed, although it is not bound."""

    class Demanding(make_op()):  # type: ignore[misc]
        @opgraft.needs(lambda: "a library that nobody has")
        def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert keys_of(Demanding)["cpu"] == "cpu"
    assert Demanding().decision.chosen.endswith("forward_native")


def test_replacements_count_where_they_apply(site) -> None:
    """A plugin for one platform changes that platform's key only, whatever its condition says here."""
    site.plugin(
        "acme",
        "import opgraft\nfrom opgraft.ops import RMSNorm\nplatforms = ('cuda',)\n"
        "@RMSNorm.register_oot(when=lambda platform: False)\n"
        "class AcmeRMSNorm(RMSNorm):\n    def forward_oot(self, x, residual=None):\n        return x\n"
        "@opgraft.hookimpl\ndef opgraft_register_ops():\n    pass\n",
    )
    keys = keys_of(RMSNorm)
    assert keys["cuda"] == "oot"
    assert keys["rocm"] != "oot"
    assert keys["cpu"] != "oot"


def test_a_conflict_is_the_key() -> None:
    """Where two replacements compete, no key can be told; the other platforms' are."""
    for _ in range(2):
        cls = type("Rival", (SiluAndMul,), {"forward_oot": lambda self, x: x})
        SiluAndMul.register_oot(cls)
    assert set(keys_of(SiluAndMul).values()) == {inventory.CONFLICT}
    with pytest.raises(ConflictError, match="2 replacements of SiluAndMul"):
        SiluAndMul()


def test_a_platform_whose_plugin_is_not_loaded_is_unknown(site) -> None:
    """What a plugin brings for a device that is not there is not guessed, and nothing of it is imported."""
    site.platform(
        "acme",
        probe="return Evidence(False, 'no device')",
        platform="raise RuntimeError",
        plugin="",
    )
    keys = keys_of(RMSNorm)
    assert list(keys) == [*BUILT_IN, "acme"]
    assert keys["acme"] is None
    assert "acme=?" in inventory.keys_in_words(keys)
    assert reasons()["acme"] == "plugins of acme-dist 1.0 are not active here"


@pytest.mark.parametrize(
    ("source", "expected", "reason"),
    [
        (
            "raise SystemExit('no driver')\n",
            None,
            "its class cannot be asked: SystemExit: no driver",
        ),
        ("class Device:\n    dispatch_chain = ('cpu',)", "native", ""),
        ("", "native", ""),
    ],
)
def test_a_platform_without_plugin_is_asked_for_its_chain(
    site, source: str, expected: str | None, reason: str
) -> None:
    """A platform class that cannot be imported or asked leaves its key unknown and says why; another one is asked."""
    site.platform("acme", probe="return Evidence(False, 'no device')", platform=source)
    assert keys_of(make_op("cuda"))["acme"] == expected
    assert reasons()["acme"] == reason


def test_platforms_that_settings_refuse_are_left_out(site) -> None:
    """A platform on the deny list is not asked."""
    site.platform(
        "acme", probe="return Evidence(False, 'no device')", platform="raise RuntimeError"
    )
    with opgraft.set_config(opgraft.OpgraftConfig(plugins_disable=("acme",))):
        assert "acme" not in keys_of(RMSNorm)


def test_keys_in_words() -> None:
    """One key for all platforms is said once."""
    assert (
        inventory.keys_in_words({"cpu": "native", "cuda": "native"}) == "native on every platform"
    )
    assert inventory.keys_in_words({"cpu": "cpu", "acme": None}) == "cpu=cpu acme=?"
    assert inventory.kernel_keys(RMSNorm, [DeclaredPlatform("acme")]) == {"acme": None}


def test_forms_belong_to_the_op_that_they_run() -> None:
    """Variants of a form, in place or fused, are of one op; a layer made of ops has none."""
    names = {form.name for form in inventory.functionals_of(RMSNorm)}
    quantised = {
        f"{name}_quant_{kind}"
        for name in ("rms_norm", "fused_add_rms_norm", "all_reduce_rms_norm")
        for kind in ("fp8_static", "fp8_dynamic", "fp4")
    }
    assert names == {
        "rms_norm",
        "fused_add_rms_norm",
        "fused_add_rms_norm_",
        "all_reduce_rms_norm",
        *quantised,
    }
    assert inventory.functionals_of(GatedMLP) == []
    assert inventory.find_op("fused_add_rms_norm") is RMSNorm
    assert inventory.find_op("rms_nrm") is None


def test_functions_of_a_kernel() -> None:
    """A form runs the function of the class that brings one, and its native definition otherwise."""

    def fast(x: torch.Tensor) -> torch.Tensor:
        return x

    class Fast(SiluAndMul):
        functional_oot: ClassVar = {"silu_and_mul": fast}

        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def functions() -> dict[str, str]:
        return {found.name: found.function for found in inventory.forms_here(SiluAndMul)}

    assert functions()["silu_and_mul"] == "opgraft.ops.activation.functional.silu_and_mul"
    SiluAndMul.register_oot(Fast)
    assert functions()["silu_and_mul"].endswith("test_functions_of_a_kernel.<locals>.fast")


def test_proofs_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every form passed is counted, as proof of the native definition; what has changed or is new is named."""
    forms = inventory.functionals_of(RMSNorm)
    known = proof_records.recorded()
    records = {form.name: dataclasses.replace(known[form.name], digest="now") for form in forms}
    monkeypatch.setattr(proof_records, "recorded", lambda: records)
    monkeypatch.setattr(proof_records, "digest_of", lambda sources: "now")

    def words() -> str:
        return inventory.proofs_in_words(RMSNorm, inventory.proofs_of(forms))

    proved = "native definition proved: 13 forms, 6 checks, 4 dtypes, 1 against torch.nn.functional.rms_norm"
    assert words() == proved
    records["fused_add_rms_norm_"] = dataclasses.replace(
        records["fused_add_rms_norm_"], dtypes=("float32",)
    )
    assert words() == proved.replace("4 dtypes", "1 dtype")
    records["rms_norm"] = dataclasses.replace(records["rms_norm"], digest="then")
    del records["fused_add_rms_norm"]
    assert words() == (
        "native definition proved: 11 forms, 6 checks, 1 dtype; changed since it was checked: rms_norm; not checked: "
        "fused_add_rms_norm"
    )
    assert inventory.proofs_of(forms)["rms_norm"]["state"] == "changed"
    assert inventory.proofs_in_words(GatedMLP, {}) == "made of other ops"


def test_the_package_for_cpus_serves_the_ops_that_it_is_said_to_serve() -> None:
    """The ops that the CPU platform names for opgraft-cpu-kernels are those that the plugin's classes replace."""
    source = REPOSITORY / "reference_plugins/opgraft-cpu-kernels/src/opgraft_cpu_kernels/ops.py"
    classes = [
        node for node in ast.parse(source.read_text("utf-8")).body if isinstance(node, ast.ClassDef)
    ]
    replaced = [
        getattr(ops, base.attr)
        for cls in classes
        for base in cls.bases
        if isinstance(base, ast.Attribute)
    ]
    served = {op_name_of(cls, host_state()) for cls in replaced if issubclass(cls, CustomOp)}
    assert served == opgraft.current_platform().kernel_packages["opgraft-cpu-kernels"]


def test_packages_that_are_not_installed(site) -> None:
    """A distribution with kernels for an op of this platform is named, unless it is installed."""
    load_plugins()
    assert inventory.missing_packages(RMSNorm) == ["opgraft-cpu-kernels"]
    assert inventory.missing_packages(MLP) == []
    site.install(
        "Opgraft_CPU_kernels", {"other.py": ""}, {"opgraft.plugins": ["cpu_kernels = other"]}
    )
    opgraft.reset()
    with opgraft.set_config(opgraft.OpgraftConfig(plugins=())):
        assert inventory.missing_packages(RMSNorm) == []
