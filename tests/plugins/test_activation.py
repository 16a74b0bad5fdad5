"""Plugins that declare in a hook, and plugins whose code ends in every way that code can."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import opgraft
import pytest
from click.testing import CliRunner
from opgraft.cli import cli as commands
from opgraft.errors import ConflictError, PlatformError
from opgraft.ops import RMSNorm
from opgraft.plugins.host import load_plugins
from opgraft.registry.state import PluginStatus, host_state

IN_A_HOOK = """
import opgraft
from opgraft.ops import RMSNorm
from opgraft.functional import relu2
platforms = "any"

def norm(scale, **options):
    class Norm(RMSNorm):
        def forward_oot(self, x, residual=None):
            return scale
    RMSNorm.register_oot(Norm, **options)

@opgraft.hookimpl
def opgraft_register_ops(platform):
    @opgraft.CustomOp.register("acme_op")
    class Acme(opgraft.CustomOp):
        def forward_native(self, x):
            return x
    BODY
"""


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("norm(3)", 3),
        ("norm(3, when=lambda platform: False); norm(4)", 4),
        ("norm(3, when=lambda platform: True); norm(4, when=lambda platform: False)", 3),
        ("norm(3, priority=1); norm(4)", 3),
    ],
)
def test_a_hook_defines_its_classes_again(site, body: str, result: int) -> None:
    """After reset a hook runs again, and the class that it defines takes the place of the one before."""
    site.plugin("acme", IN_A_HOOK.replace("BODY", body))
    for _ in range(3):
        assert RMSNorm(4)(None) == result
        assert host_state().plugins["acme"].status is PluginStatus.ACTIVATED, (
            host_state().plugins["acme"].reason
        )
        assert len(host_state().active) == body.count("norm")
        assert opgraft.CustomOp.op_registry["acme_op"]()(5) == 5
        opgraft.reset()
    assert len([r for r in host_state().registry.replacements if r.plugin == "acme"]) == body.count(
        "norm"
    )


def test_two_classes_of_one_statement_still_compete(site) -> None:
    """Within one activation nothing takes the place of anything: a tie is a tie."""
    site.plugin("acme", IN_A_HOOK.replace("BODY", "norm(3); norm(4)"))
    with pytest.raises(ConflictError, match="decides by register_oot"):
        RMSNorm(4)


def test_an_op_of_somebody_else_keeps_its_name(site) -> None:
    """A statement of one plugin cannot stand for that of another, which registers the same name."""
    site.plugin("acme", IN_A_HOOK.replace("BODY", "pass"))
    site.plugin("zeta", IN_A_HOOK.replace("BODY", "pass"))
    load_plugins()
    statuses = {name: record.status for name, record in host_state().plugins.items()}
    assert sorted(status.value for status in statuses.values()) == ["activated", "failed"]


UNPRINTABLE = """
class Silent(Exception):
    def __str__(self):
        raise SystemExit("in __str__")
    __repr__ = __str__
"""
RAISES = ["raise Silent()", "raise SystemExit(0)"]


@pytest.mark.parametrize("raises", RAISES)
@pytest.mark.parametrize("place", ["import", "hook", "when", "needs"])
def test_whatever_a_plugin_raises_names_it(site, cli, place: str, raises: str) -> None:
    """At import, in a hook, in a condition or a check: the plugin is named, and nothing else stops."""
    source = UNPRINTABLE + (
        "import opgraft\nfrom opgraft.ops import RMSNorm\nplatforms = 'any'\n"
        f"def fail(*platform):\n    {raises}\n"
        "@opgraft.hookimpl\ndef opgraft_veto(platform):\n    HOOK\n"
        "@RMSNorm.register_oot(WHEN)\nclass Norm(RMSNorm):\n    NEEDS\n"
        "    def forward_oot(self, x, residual=None): ...\n"
        "IMPORT\n"
    )
    marks = {
        "import": "fail()",
        "hook": "return fail()",
        "when": "when=fail",
        "needs": "@opgraft.needs(fail)",
    }
    for mark in marks:
        source = source.replace(
            mark.upper(), marks[mark] if mark == place else "pass" if mark != "when" else ""
        )
    site.plugin("acme", source)
    doctor = cli("plugins", "doctor")
    explain = CliRunner().invoke(commands, ["ops", "explain", "rms_norm"])
    if place != "needs":  # a kernel that is not chosen; the replacement is
        assert doctor.returncode == {"import": 4, "hook": 4, "when": 1}[place], (
            doctor.stdout + doctor.stderr
        )
    assert "acme" in doctor.stdout
    assert explain.exit_code == 0, explain.output
    assert raises.split()[1].split("(")[0] in explain.stdout


@pytest.mark.parametrize("raises", RAISES)
def test_a_platform_that_cannot_be_set_up(site, cli, raises: str) -> None:
    """What ``prepare`` raises names the platform and its distribution, and no plugin stays half loaded."""
    platform = UNPRINTABLE + (
        "from opgraft.platforms.cpu.platform import CpuPlatform\n"
        "class Device(CpuPlatform):\n    name = 'acme'\n"
        f"    def prepare(self, config):\n        {raises}\n"
    )
    plugin = IN_A_HOOK.replace("BODY", "norm(3)")
    site.platform("acme", probe="return Evidence(True, 'here')", platform=platform, plugin=plugin)
    for _ in range(2):
        with pytest.raises(
            PlatformError, match=r"platform 'acme' of acme-dist 1.0 cannot be set up: its prepare"
        ):
            load_plugins()
        assert host_state().active == []
    result = cli("plugins", "doctor")
    assert result.returncode == 3
    assert "platform 'acme' of acme-dist 1.0" in result.stdout


def crashing_library(folder: Path) -> Path:
    """A shared library whose function writes to no address."""
    source, library = folder / "crash.c", folder / "crash.so"
    source.write_text("void crash(void) { *(volatile int *)0 = 1; }\n")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


@pytest.mark.parametrize("kind", ["exit", "crash"])
@pytest.mark.parametrize("place", ["import", "hook", "platform"])
def test_a_plugin_that_ends_the_process_is_named_by_doctor(
    site, cli, tmp_path: Path, kind: str, place: str
) -> None:
    """Neither os._exit(0) nor a segmentation fault ends doctor, which says whose code it was."""
    end, message = {
        "exit": ("import os; os._exit(0)", "ended the process with status 0"),
        "crash": (
            f"import ctypes; ctypes.CDLL({str(crashing_library(tmp_path))!r}).crash()",
            "signal SIGSEGV",
        ),
    }[kind]
    hook = f"import opgraft\nplatforms = 'any'\n@opgraft.hookimpl\ndef opgraft_register_ops(platform):\n    {end}\n"
    if place == "platform":
        site.platform("acme", probe="return Evidence(True, 'here')", platform=end)
    else:
        site.plugin("acme", {"import": end, "hook": hook}[place])
    result = cli("plugins", "doctor")
    assert result.returncode == 4, result.stdout + result.stderr
    assert " ".join(message.split()) in " ".join(result.stdout.split())
    assert "'acme' of acme" in result.stdout
    if kind == "exit":  # where it is not loaded, how it would end makes no difference
        denied = cli("plugins", "doctor", "--plugins_disable", "acme")
        assert denied.returncode == 0, denied.stdout


def test_a_segmentation_fault_elsewhere_shows_the_file(site, cli, tmp_path: Path) -> None:
    """Where a plugin is loaded in the process itself, the last words name its file."""
    site.plugin("acme", f"import ctypes; ctypes.CDLL({str(crashing_library(tmp_path))!r}).crash()")
    result = cli("ops", "list")
    assert result.returncode == -11
    assert "acme.py" in result.stderr
