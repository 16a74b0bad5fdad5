"""What became of a plugin is told truthfully: by 'plugins show', 'list' and 'doctor', each with its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HEAD = """
import opgraft
from opgraft.ops import RMSNorm
platforms = "any"
class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return RMSNorm.forward_native(self, x, residual)
"""
HOOK = "@opgraft.hookimpl\ndef opgraft_register_ops(platform):\n    RMSNorm.register_oot(AcmeRMSNorm)\n"
DEAD_ROW = "    opgraft.CustomOp.register_oot('RMSNormClamp')(AcmeRMSNorm)\n"


def answer(cli, *arguments: str, **variables: str) -> tuple[int, dict]:
    """The exit code and the JSON of a command."""
    result = cli(*arguments, "--json", **variables)
    return result.returncode, json.loads(result.stdout)


def place(file: Path, text: str) -> str:
    """``file:line`` of the line that holds ``text``."""
    lines = file.read_text().splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


class TestShow:
    """'opgraft plugins show --load' ends as the doctor does for the same plugin."""

    def test_a_row_that_was_left_out(self, cli, site) -> None:
        """Status and rows say which replacement is not active; the exit code is that of a finding."""
        site.plugin("acme", HEAD + HOOK + DEAD_ROW)
        code, shown = answer(cli, "plugins", "show", "acme", "--load")
        (offer,) = shown["offers"]
        (finding,) = shown["findings"]
        assert (code, offer["status"]) == (1, "activated")
        assert (
            offer["reason"]
            == "applies on any; left out: RMSNormClamp, which no registered op answers to"
        )
        assert [(row["target"], row["active"]) for row in offer["replacements"]] == [
            ("opgraft.ops.layernorm.modules:RMSNorm", True),
            ("RMSNormClamp", False),
        ]
        assert "replaces 'RMSNormClamp', which no registered op answers to" in finding["message"]
        text = cli("plugins", "show", "acme", "--load").stdout
        assert (
            f"RMSNormClamp -> AcmeRMSNorm at {place(site.folder / 'acme.py', 'class')} (not active)"
            in text
        )
        assert "finding: plugin acme of acme 1.0: acme:AcmeRMSNorm" in text

    @pytest.mark.parametrize(
        ("source", "code", "status"),
        [
            (HEAD + HOOK, 0, "activated"),
            (
                HEAD + HOOK + "@opgraft.hookimpl\ndef opgraft_veto():\n    return 'old driver'\n",
                1,
                "vetoed",
            ),
            (HEAD + HOOK + "    raise OSError('no driver')\n", 4, "failed"),
            ("raise OSError('no driver')", 4, "failed"),
        ],
    )
    def test_the_exit_code_is_the_doctors(
        self, cli, site, source: str, code: int, status: str
    ) -> None:
        """0 where it works, 1 where it is not used, 4 where it failed."""
        site.plugin("acme", source)
        shown = answer(cli, "plugins", "show", "acme", "--load")
        assert (shown[0], shown[1]["offers"][0]["status"]) == (code, status)
        assert answer(cli, "plugins", "doctor")[0] == code

    def test_another_plugin_that_failed_is_not_its_fault(self, cli, site) -> None:
        """Findings are those of the plugin that was asked for."""
        site.plugin("acme", HEAD + HOOK)
        site.plugin("brix", "raise OSError('no driver')")
        assert answer(cli, "plugins", "show", "acme", "--load")[0] == 0

    def test_a_platform_whose_probe_failed(self, cli, site) -> None:
        """A platform is shown with what its probe raised."""
        site.platform("brix", probe="raise OSError('bus error')")
        code, shown = answer(cli, "plugins", "show", "brix", "--load")
        assert code == 1
        assert "raised OSError: bus error" in shown["findings"][0]["message"]

    def test_what_the_checks_find_is_shown(self, cli, site) -> None:
        """A misspelt hook without a mark, and a conflict with another plugin, are findings of the plugin here too."""
        rival = HEAD.replace("Acme", "Brix").replace("acme", "brix")
        site.plugin("acme", HEAD + HOOK + "def opgraft_vetoo(platform):\n    return 'no'\n")
        site.plugin("brix", rival + HOOK.replace("Acme", "Brix"))
        code, shown = answer(cli, "plugins", "show", "acme", "--load")
        told = [finding["message"] for finding in shown["findings"]]
        assert code == answer(cli, "plugins", "doctor")[0] == 1
        assert any("opgraft_vetoo is never called" in message for message in told), told
        assert any("2 replacements of RMSNorm" in message for message in told), told
        assert not any(
            "opgraft_vetoo" in f["message"]
            for f in answer(cli, "plugins", "show", "brix", "--load")[1]["findings"]
        )

    def test_a_platform_of_a_device_type_that_torch_does_not_know(self, cli, site) -> None:
        """It is a finding of the platform, with exit code 1; the checks that need a device are left out."""
        source = (
            "from opgraft.platforms.cpu.platform import CpuPlatform\nclass Device(CpuPlatform):\n"
        )
        source += "    name = 'brix'\n    dispatch_chain = ('native',)\n    device_type = 'cpuu'\n"
        plugin = HEAD.replace('platforms = "any"\n', "") + HOOK
        site.platform("brix", probe="return Evidence(True, 'here')", platform=source, plugin=plugin)
        code, shown = answer(cli, "plugins", "show", "brix", "--load")
        (finding,) = shown["findings"]
        assert "cannot use its device_type 'cpuu'" in finding["message"]
        assert code == answer(cli, "plugins", "doctor")[0] == 1


class TestDoctor:
    """'opgraft plugins doctor' tells each fault once, with its place and the next step."""

    @pytest.mark.parametrize("strict", ["0", "1"])
    def test_one_failure_is_told_once(self, cli, site, strict: str) -> None:
        """In strict mode too it is one finding, with its place and the way to its traceback."""
        site.plugin("acme", "import os\ndef kaboom():\n    os.stat('/no/driver')\nkaboom()\n")
        code, told = answer(cli, "plugins", "doctor", OPGRAFT_STRICT=strict)
        (finding,) = told["findings"]
        assert code == 4
        assert finding["location"] == place(site.folder / "acme.py", "os.stat")
        assert "'opgraft plugins show acme --load' has the traceback" in finding["message"]
        text = cli("plugins", "doctor", OPGRAFT_STRICT=strict).stdout
        assert text.count("FileNotFoundError") == 1
        assert text.startswith("acme (acme 1.0): failed\n")

    def test_a_reason_that_stands_in_the_finding_of_another_plugin_is_told(self, cli, site) -> None:
        """Only a plugin's own finding replaces the reason in its row."""
        site.plugin("acme", HEAD + HOOK)
        veto = "@opgraft.hookimpl\ndef opgraft_veto():\n    return 'acme applies on any'\n"
        site.plugin("brix", "import opgraft\nplatforms = 'any'\n" + veto)
        lines = cli("plugins", "doctor").stdout.splitlines()
        assert {"acme (acme 1.0): activated: applies on any", "brix (brix 1.0): vetoed"} <= set(
            lines
        )


def test_list_and_show_tell_of_a_misspelt_group(cli, site) -> None:
    """A plugin that is installed and that nothing reads is not passed over in silence, and the doctor is named."""
    site.install("acme", {"acme.py": ""}, {"opgraft.plugin": ["acme = acme"]})
    meant = "'opgraft.plugins'"
    words = f"acme 1.0: nothing reads its entry-point group 'opgraft.plugin': did you mean {meant}?"
    listed = cli("plugins", "list").stdout
    assert f"ignored: {words}\n" in listed
    assert listed.endswith("to load and check them: opgraft plugins doctor\n")
    assert answer(cli, "plugins", "list")[1]["problems"][0]["reason"] in words
    shown = cli("plugins", "show", "acme")
    assert shown.returncode == 2
    assert words in shown.stderr
    assert "'opgraft plugins doctor'" in shown.stderr


def test_ops_list_has_a_column_for_what_was_passed_over(cli, site) -> None:
    """A kernel whose check raises is told in the row of its op; where there is none, there is no column."""
    assert cli("ops", "list").stdout.splitlines()[1].split() == [
        "op",
        "class",
        "kernel",
        "provider",
    ]
    site.plugin(
        "acme",
        HEAD.replace("    def", "    @opgraft.needs(lambda: 1 / 0)\n    def") + HOOK,
    )
    result = cli("ops", "list")
    row = next(line for line in result.stdout.splitlines() if line.startswith("rms_norm "))
    assert "AcmeRMSNorm.forward_oot is not used: its needs() check raised ZeroDivisionError" in row
    assert "AcmeRMSNorm.forward_oot at " in result.stderr


@pytest.mark.parametrize("further", [{}, {"opgraft.plugins": ["acme = acme"]}])
def test_a_plugin_of_vllm_is_seen(cli, site, further: dict[str, list[str]]) -> None:
    """List and doctor name a distribution for vLLM only and what to change; that is a note and no finding."""
    theirs = {
        "vllm.general_plugins": ["acme = acme:register"],
        "vllm.platform_plugins": ["acme = acme:platform"],
    }
    site.install("acme", {"acme.py": HEAD + HOOK}, {**theirs, **further})
    site.install("vllm", {"vllm.py": ""}, {"vllm.general_plugins": ["resolver = vllm:register"]})
    words = (
        "acme 1.0: a plugin of vLLM, which opgraft does not load: "
        "its entry-point group vllm.platform_plugins becomes "
    )
    for command in ("list", "doctor"):
        shown = cli("plugins", command)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert (
            f"seen: {words}opgraft.platforms and vllm.general_plugins becomes" in shown.stdout
        ) == (not further)
        assert shown.stdout.count("seen:") == (0 if further else 1)
        notes = answer(cli, "plugins", command)[1]["notes"]
        assert [note["provider"]["name"] for note in notes] == ([] if further else ["acme"])


def test_details_without_a_value_are_not_shown(cli) -> None:
    """A platform that requires nothing has no line that says so."""
    lines = cli("plugins", "show", "cpu").stdout.splitlines()
    assert "name: cpu" in lines
    assert [line for line in lines if line.rstrip().endswith(":")] == []


def test_an_op_that_raises_is_named_below_the_error(cli, site, causal_folder: Path) -> None:
    """Where a constructor of a plugin's op raises, stderr ends with op, provider, place and setting, as JSON does."""
    broken = (
        "import opgraft\nfrom opgraft.ops import RMSNorm\nplatforms = 'any'\nclass Acme(RMSNorm):\n"
        "    def __init__(self, *sizes, **named):\n        raise RuntimeError('no driver')\n"
        "@opgraft.hookimpl\ndef opgraft_register_ops():\n    RMSNorm.register_oot(Acme)\n"
    )
    site.plugin("acme", broken, version="3.1")
    result = cli("run", str(causal_folder), "the cat", "--json", "--load.progress", "false")
    assert result.returncode == 4
    assert "RuntimeError: no driver" in result.stderr
    told = json.loads(result.stdout)["error"]["provenance"]
    assert (told["op"], told["kernel"], told["provider"]["version"]) == (
        "rms_norm",
        "Acme.__init__",
        "3.1",
    )
    last = result.stderr.splitlines()[-1]
    assert "raised in op rms_norm, by Acme.__init__ of acme 3.1 at " in last
    assert told["location"].endswith("acme.py:6")


def test_json_is_one_object_where_a_prompt_fails(cli, site, causal_folder: Path) -> None:
    """The answers so far with the reason of the others, or the error if there is no answer; both end with code 4."""
    broken = (
        "import opgraft\nfrom opgraft.ops import RMSNorm\nplatforms = 'any'\nclass Acme(RMSNorm):\n"
        "    calls = 0\n"
        "    def forward_oot(self, *inputs):\n"
        "        Acme.calls += 1\n"
        "        if Acme.calls > self.working:\n            raise OSError('no device')\n"
        "        return self.forward_native(*inputs)\n"
        "    working = {working}\n"
        "@opgraft.hookimpl\ndef opgraft_register_ops():\n    RMSNorm.register_oot(Acme)\n"
    )
    one_by_one = ("--max-tokens", "1", "--scheduler.max_num_seqs", "1", "--load.progress", "false")
    found = {}
    for name, working in (("none", 0), ("one", 6)):
        site.plugin(name, broken.replace("{working}", str(working)), version="3.1")
        result = cli(
            "run",
            str(causal_folder),
            "the cat",
            "a dog",
            "--json",
            *one_by_one,
            OPGRAFT_PLUGINS=name,
        )
        assert (result.returncode, "no device" in result.stderr) == (4, True), result.stderr
        found[name] = json.loads(result.stdout)
    assert found["none"]["schema"] == "opgraft.error/1"
    reasons = [answer["finish_reason"] for answer in found["one"]["answers"]]
    assert reasons == ["length", "error"]
    assert "no device" in found["one"]["answers"][1]["error"]
