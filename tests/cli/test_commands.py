"""The command line as users run it: a process of its own, its output, its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import click
import opgraft
import pytest
from opgraft.cli import cli as root

PLUGIN = """
import opgraft
from opgraft.ops import RMSNorm
platforms = "any"
class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return super().forward_native(x, residual)
@opgraft.hookimpl
def opgraft_register_ops():
    RMSNorm.register_oot(AcmeRMSNorm)
"""


def test_version_and_help() -> None:
    """opgraft --version prints the version; help lists every command with a summary."""
    for arguments, expected in (
        (["--version"], opgraft.__version__),
        (["-h"], "Show which platform"),
    ):
        command = [sys.executable, "-m", "opgraft", *arguments]
        assert (
            expected in subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )


@pytest.mark.parametrize("command", ["detect", "env", "plugins list", "plugins show acme"])
def test_detection_imports_no_torch_and_no_plugin(site, command: str) -> None:
    """detect, env, plugins list and show stay free of torch and of the plugins' code."""
    site.plugin("acme", PLUGIN)
    code = (
        "import sys; from opgraft.cli import cli; sys.exit = lambda code: None; "
        f"sys.path.insert(0, {str(site.folder)!r}); cli({command.split()!r}, standalone_mode=False); "
        "raise SystemExit(any(name in sys.modules for name in ('torch', 'numpy', 'pluggy', 'rich', 'acme')))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )


def test_detect_explains_the_decision_in_80_columns(terminal, site) -> None:
    """Every candidate with reason and evidence, and the setting; no colour, no line over 80."""
    site.platform("acme", probe="return Evidence(False, 'no device')")
    lines = terminal("detect", "--all", columns=80)
    text = "\n".join(lines)
    assert text.startswith("platform: cpu (")
    for word in ("- acme [acme-dist 1.0]", "no device", "/proc/cpuinfo", "OPGRAFT_PLATFORM"):
        assert word in text
    assert max(map(len, lines)) <= 80
    assert "\033" not in text


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "message"),
    [
        (["detect", "--platform", "nope"], {}, 3, "the command line asks for platform 'nope'"),
        (["detect"], {"OPGRAFT_PLATFORM": "nope"}, 3, "OPGRAFT_PLATFORM asks for platform 'nope'"),
        (["detect"], {"OPGRAFT_STRICT": "perhaps"}, 2, "OPGRAFT_STRICT='perhaps' is not a flag"),
        (["detect"], {"OPGRAFT_PLATFROM": "cpu"}, 2, "did you mean 'OPGRAFT_PLATFORM'"),
        (
            ["ops", "list", "--compilation_config.custom_ops", "all,none"],
            {},
            2,
            "both 'all' and 'none'",
        ),
        (
            ["ops", "list", "--compilation_config.custom_ops", "+rms_nrm"],
            {},
            2,
            "did you mean 'rms_norm'",
        ),
        (["ops", "list", "--providers", "{"], {}, 2, "not valid JSON"),
        (["ops", "explain", "rms_nrm"], {}, 2, "did you mean 'rms_norm'"),
        (
            ["ops", "explain", ""],
            {},
            2,
            "no op is called '': 'opgraft ops list' shows the names of all.",
        ),
        (
            ["plugins", "show", "nothing"],
            {},
            2,
            "no installed plugin or platform is called 'nothing'",
        ),
        (
            ["plugins", "doctor"],
            {"OPGRAFT_PLUGINS": "nothing"},
            2,
            "names 'nothing' (OPGRAFT_PLUGINS)",
        ),
        (
            ["detect", "--plugins", "zedd"],
            {},
            2,
            "plugins names 'zedd' (the command line), which is not installed",
        ),
        (
            ["plugins", "list", "--plugins", "zedd"],
            {},
            2,
            "plugins names 'zedd' (the command line)",
        ),
        (
            ["plugins", "doctor"],
            {"OPGRAFT_PLUGINS_DISABLE": "cpuu"},
            1,
            "the deny list names 'cpuu'",
        ),
        (["detect", "--strict", "maybe"], {}, 2, "--strict='maybe' is not a flag"),
        (["detect", "--compilation_config.mode", "²"], {}, 2, "mode is '²'"),
        (["detect", "--providers", '{"a":' * 20_000], {}, 2, "not valid JSON"),
        (["unknown"], {}, 2, "No such command"),
        (["run", "nowhere"], {}, 2, "'nowhere' is no folder"),
    ],
)
def test_errors_are_one_message_and_their_exit_code(
    cli, arguments, variables, code: int, message: str
) -> None:
    """What is wrong goes to stderr (a doctor's findings to stdout), without a traceback."""
    result = cli(*arguments, **variables)
    assert result.returncode == code
    assert message in " ".join((result.stderr + result.stdout).split())
    assert "Traceback" not in result.stderr


def test_ops_explain_shows_candidates_winner_places_and_setting(cli, site) -> None:
    """Which kernel, why, file:line of each candidate, who provides it, and what would change it."""
    site.plugin("acme", PLUGIN)
    text = cli("ops", "explain", "rms_norm").stdout
    words = (
        "AcmeRMSNorm.forward_oot",
        "acme.py:6",
        "layernorm/modules.py:",
        "[acme 1.0]",
        "OPGRAFT_CUSTOM_OPS",
        "platform: cpu",
    )
    for word in words:
        assert word in "".join(text.split("\n")) or word in " ".join(text.split())
    off = cli("ops", "explain", "RMSNorm", "--compilation_config.custom_ops", '["none"]').stdout
    assert "RMSNorm.forward_native (disabled: 'none' in custom_ops (the command line)" in " ".join(
        off.split()
    )


def test_ops_list_shows_every_op_with_its_kernel(cli, site) -> None:
    """Each registered op has a row, with the provider that serves it here."""
    site.plugin("acme", PLUGIN)
    rows = {row["op"]: row for row in json.loads(cli("ops", "list", "--json").stdout)["ops"]}
    assert rows["rms_norm"]["kernel"] == "AcmeRMSNorm.forward_oot"
    assert rows["rms_norm"]["provider"] == {"name": "acme", "version": "1.0"}
    assert rows["layer_norm"]["kernel"] == "LayerNorm.forward_native"
    lines = {line.split()[0]: line for line in cli("ops", "list").stdout.splitlines()}
    assert lines["rms_norm"].split() == ["rms_norm", "AcmeRMSNorm", "oot", "acme"]
    text = cli("ops", "list", "--compilation_config.custom_ops", "-rms_norm").stdout
    assert ["rms_norm", "AcmeRMSNorm", "native,", "disabled", "opgraft"] in [
        line.split() for line in text.splitlines()
    ]


def test_ops_list_shows_kernels_per_platform_and_evidence(cli, site) -> None:
    """Each row tells which kernel every installed platform would get, and what was proved of which forms."""
    site.plugin("acme", PLUGIN)
    row = next(
        row
        for row in json.loads(cli("ops", "list", "--json").stdout)["ops"]
        if row["op"] == "rms_norm"
    )
    assert set(row["kernels"].values()) == {"oot"}
    assert set(row["kernels"]) == {"cpu", "cuda", "rocm", "tpu", "xpu"}
    assert "fused_add_rms_norm_" in row["forms"]
    assert row["proofs"]["rms_norm"]["outside"] == ["torch.nn.functional.rms_norm"]
    text = " ".join(cli("ops", "list", "--details").stdout.split())
    assert "oot on every platform" in text
    assert "cpu=cpu cuda=" in text
    proved = "native definition proved: 4 forms, 6 checks, 4 dtypes, 1 against torch.nn.functional.rms_norm"
    assert proved in text


def test_ops_explain_tells_what_a_functional_form_runs_and_what_is_not_installed(cli, site) -> None:
    """The name of a form will do; each form of the op is listed with its function, missing packages with a remedy."""
    answer = json.loads(cli("ops", "explain", "fused_add_rms_norm", "--json").stdout)
    assert answer["decision"]["subject"] == "op rms_norm"
    functions = {form["name"]: form["function"] for form in answer["forms"]}
    assert functions["rms_norm"] == "opgraft.ops.layernorm.functional.rms_norm"
    assert answer["not_installed"] == ["opgraft-cpu-kernels"]
    text = " ".join(cli("ops", "explain", "rms_norm").stdout.split())
    assert "opgraft.functional.rms_norm runs opgraft.ops.layernorm.functional.rms_norm" in text
    assert "not installed: opgraft-cpu-kernels has kernels for this op on this platform" in text


def test_ops_list_goes_on_past_a_conflict(cli, site) -> None:
    """One op that two plugins claim does not hide the others; the row says who claims it, and the exit code is 1."""
    site.plugin("acme", PLUGIN)
    site.plugin("brix", PLUGIN)
    result = cli("ops", "list", "--json")
    rows = {row["op"]: row for row in json.loads(result.stdout)["ops"]}
    assert result.returncode == 1
    assert "2 replacements of RMSNorm" in rows["rms_norm"]["error"]
    assert rows["layer_norm"]["error"] is None
    assert "conflict: 2 replacements of" in " ".join(cli("ops", "list").stdout.split())


def test_plugins_show_says_when_loading_failed(cli) -> None:
    """Where no platform can be decided, show prints what is known and ends with the error's exit code."""
    result = cli("plugins", "show", "cpu", "--load", OPGRAFT_PLATFORM="nope")
    assert result.returncode == 3
    assert "name: cpu" in result.stdout
    assert "asks for platform 'nope'" in result.stderr


def test_plugins_list_shows_what_the_settings_select(cli, site) -> None:
    """Installed, selected and excluded offers are told apart without importing them."""
    site.plugin("acme", "raise RuntimeError")
    site.plugin("brix", "raise RuntimeError", requires=["opgraft>=99"])
    rows = {
        row["name"]: row for row in json.loads(cli("plugins", "list", "--json").stdout)["offers"]
    }
    assert rows["acme"]["status"] == "selected"
    assert "requires 'opgraft>=99'" in rows["brix"]["reason"]
    assert "requires 'opgraft>=99'" in " ".join(cli("plugins", "list").stdout.split())


def test_plugins_show_has_the_traceback(cli, site) -> None:
    """For a plugin that failed, show prints where it failed."""
    site.plugin("acme", "def kaboom():\n    raise OSError('no driver')\nkaboom()")
    text = cli("plugins", "show", "acme", "--load").stdout
    assert "status: failed" in text
    assert "in kaboom" in text


@pytest.mark.parametrize(
    ("sources", "code", "finding"),
    [
        ({"acme": PLUGIN}, 0, "nothing wrong"),
        (
            {"acme": "raise OSError('no driver')"},
            4,
            "finding: plugin 'acme' of acme 1.0 failed while it was loaded",
        ),
        ({"acme": PLUGIN, "brix": PLUGIN}, 1, "finding: 2 replacements of RMSNorm have priority 0"),
        (
            {"acme": PLUGIN, "brix": PLUGIN.replace("(AcmeRMSNorm)", "(AcmeRMSNorm, priority=1)")},
            1,
            "(acme 1.0) is never used: priority 0 is below 1",
        ),
        (
            {"acme": PLUGIN + "    opgraft.CustomOp.register_oot('RMSNrm')(AcmeRMSNorm)\n"},
            1,
            "finding: plugin acme of acme 1.0: acme:AcmeRMSNorm at",
        ),
    ],
)
def test_doctor_reports_findings_by_exit_code(
    cli, site, sources: dict[str, str], code: int, finding: str
) -> None:
    """0 nothing wrong, 1 findings, 4 a plugin failed."""
    for name, source in sources.items():
        site.plugin(name, source)
    result = cli("plugins", "doctor")
    assert finding in " ".join(result.stdout.split())
    assert result.returncode == code


def test_doctor_finds_platforms_and_metadata_that_do_not_work(cli, site) -> None:
    """A probe that crashes and an entry_points.txt that cannot be read are findings."""
    site.platform("acme", probe="raise OSError('bus error')")
    site.install("broken-dist", {}, "[opgraft.plugins]\nbroken = not a module")
    result = cli("plugins", "doctor")
    assert result.returncode == 1
    assert "bus error" in result.stdout
    assert "broken-dist" in result.stdout


def test_doctor_speaks_even_where_torch_cannot_be_imported(cold_cli, site) -> None:
    """A line without '=' in any entry_points.txt breaks `import torch` itself; the doctor says whose it is."""
    site.install("broken-dist", {}, "[opgraft.plugins]\nbroken")
    result = cold_cli("plugins", "doctor")
    assert result.returncode == 4
    assert "broken-dist" in result.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in result.stdout


def test_env_is_markdown_without_secrets(cli, site, monkeypatch) -> None:
    """Versions, platform, plugins with status, settings with origin, own variables; nothing else of the environment."""
    site.plugin("acme", PLUGIN)
    site.plugin("brix", "raise RuntimeError", requires=["opgraft>=99"])
    variables = {
        "SECRET_TOKEN": "hunter2",
        "OPGRAFT_CUSTOM_OPS": "all",
        "OPGRAFT_PROVIDERS": "silu=acme",
    }
    text = cli("env", **variables).stdout
    assert "| torch | " in text
    assert f"| Python | {sys.version.split()[0]} |" in text
    assert "| system | " in text
    assert "| plugin acme | acme 1.0 (acme): selected |" in text
    assert "| plugin brix | brix 1.0 (brix): rejected: it requires 'opgraft>=99'" in text
    assert '| compilation_config.custom_ops | ["all"] (OPGRAFT_CUSTOM_OPS) |' in text
    assert '| providers | {"silu": "acme"} (OPGRAFT_PROVIDERS) |' in text
    assert "| strict | false (default) |" in text
    assert "| OPGRAFT_CUSTOM_OPS | all |" in text
    assert "hunter2" not in text


def test_every_command_has_json_and_a_help_text() -> None:
    """The contract of all commands: a sentence on what they do, and --json but for those that go on until ended.

    'opgraft conformance' writes its JSON to a file, as it goes; 'plugins check' is its short form, for people. The
    output of 'opgraft exec' is that of the program, and OPGRAFT_REPORT names a file for JSON; 'opgraft trace-shapes'
    writes a file, too.
    """

    def walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                yield from walk(command.get_command(context, name), f"{path} {name}")
        else:
            yield path, command

    commands = dict(walk(root, "opgraft"))
    others = (
        *("opgraft chat", "opgraft serve", "opgraft exec"),
        *("opgraft conformance", "opgraft plugins check", "opgraft trace-shapes"),
    )
    assert len(commands) > 7
    for path, command in commands.items():
        assert command.help, path
        assert any(parameter.name == "as_json" for parameter in command.params) is (
            path not in others
        ), path


def test_env_tells_of_settings_that_cannot_be_used(cli) -> None:
    """A variable with a bad value does not keep the report from being written; the error is in it."""
    result = cli("env", OPGRAFT_STRICT="perhaps")
    assert result.returncode == 0
    assert "| error | OPGRAFT_STRICT='perhaps' is not a flag" in result.stdout
