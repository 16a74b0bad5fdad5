"""Settings are told with the place where they were set, which is the place where they must be changed."""

from __future__ import annotations

import json
from pathlib import Path

import opgraft
import pytest
from opgraft import OpgraftConfig, ops, set_config

PLUGIN = """
import opgraft
from opgraft.ops import RMSNorm
platforms = "any"
class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return RMSNorm.forward_native(self, x, residual)
@opgraft.hookimpl
def opgraft_register_ops(platform):
    RMSNorm.register_oot(AcmeRMSNorm)
"""


def test_the_file_of_an_option_stands_instead_of_that_of_the_variable(cli, tmp_path: Path) -> None:
    """A file that another one replaces is not opened; alone it is an error."""
    (tmp_path / "good.toml").write_text("platform = 'cpu'\n")
    result = cli("detect", "--config", "good.toml", OPGRAFT_CONFIG="nope.toml")
    assert result.returncode == 0, result.stderr
    assert "asked for by good.toml, line 1" in result.stdout
    result = cli("detect", OPGRAFT_CONFIG="nope.toml")
    assert (result.returncode, "OPGRAFT_CONFIG: the config file nope.toml" in result.stderr) == (
        2,
        True,
    )


def test_env_takes_settings(cli, tmp_path: Path) -> None:
    """A bug report shows the file's settings and those of options with their origins."""
    (tmp_path / "good.toml").write_text("platform = 'cpu'\n")
    sections = json.loads(cli("env", "--json", "--config", "good.toml", "--strict", "1").stdout)[
        "sections"
    ]
    assert sections["Settings"]["platform"] == "cpu (good.toml, line 1)"
    assert sections["Settings"]["strict"] == "true (the command line)"


@pytest.mark.parametrize(
    ("arguments", "name", "variable"),
    [
        (("detect", "--platform", "cpu"), "platform", "OPGRAFT_PLATFORM"),
        (
            ("ops", "explain", "rms_norm", "--compilation_config.custom_ops=-rms_norm"),
            "compilation_config.custom_ops",
            "OPGRAFT_CUSTOM_OPS",
        ),
        (
            ("ops", "explain", "rms_norm", "--providers", "rms_norm=opgraft"),
            "providers",
            "OPGRAFT_PROVIDERS",
        ),
        (("ops", "explain", "rms_norm", "--plugins", "acme"), "plugins", "OPGRAFT_PLUGINS"),
    ],
)
def test_what_outranks_the_environment_is_named(
    cli, site, arguments: tuple[str, ...], name: str, variable: str
) -> None:
    """Where an option has set it, no variable would change it."""
    site.plugin("acme", PLUGIN)
    shown = cli(*arguments).stdout
    assert f"{name} is set by the command line, which outranks {variable}: change it there" in shown
    assert f"to change it: {variable}" not in shown
    variables = {variable: arguments[-1].partition("=")[2] if "." in name else arguments[-1]}
    shown = cli(*arguments[: 1 if name == "platform" else 3], **variables).stdout
    assert f"to change it: {variable}" in shown


def test_a_scope_and_a_constructor_are_named() -> None:
    """A set_config scope outranks the environment, and enforce_enable both."""
    off = OpgraftConfig(compilation_config=opgraft.CompilationConfig(custom_ops=["none"]))
    with set_config(off):
        setting = ops.RMSNorm(4).binding.kernel.switch
        assert setting.startswith(
            "compilation_config.custom_ops is set by set_config, which outranks"
        )
        assert ops.ApplyRotaryEmb(enforce_enable=True).binding.kernel.switch == "enforce_enable"
    assert ops.RMSNorm(4).binding.decision.setting.startswith(("OPGRAFT_CUSTOM_OPS", ""))


def test_lists_name_the_place_where_they_were_set(cli, site, tmp_path: Path) -> None:
    """A file with its line, the variable, or the command line."""
    site.plugin("acme", PLUGIN)
    (tmp_path / "dis.toml").write_text("plugins_disable = ['acme']\n")
    for arguments, variables, words in (
        (("--config", "dis.toml"), {}, "on the deny list plugins_disable (dis.toml, line 1)"),
        (("--plugins_disable", "acme"), {}, "on the deny list plugins_disable (the command line)"),
        ((), {"OPGRAFT_PLUGINS": ""}, "not on the allow list plugins (OPGRAFT_PLUGINS)"),
    ):
        assert words in cli("plugins", "list", *arguments, **variables).stdout


@pytest.mark.parametrize("command", [("explain", "rms_norm"), ("list",)])
def test_a_provider_that_is_not_there_is_a_bad_value(cli, site, command: tuple[str, ...]) -> None:
    """It is no conflict: exit code 2, with close matches."""
    site.plugin("acme", PLUGIN)
    result = cli("ops", *command, OPGRAFT_PROVIDERS="rms_norm=acmee")
    assert result.returncode == 2, result.stdout
    assert "asks for 'acmee' for 'rms_norm' (OPGRAFT_PROVIDERS)" in result.stderr
    assert "did you mean 'acme'?" in result.stderr
    assert "conflict" not in result.stdout + result.stderr
    doctor = cli("plugins", "doctor", OPGRAFT_PROVIDERS="rms_norm=acmee")
    assert doctor.returncode == 2
