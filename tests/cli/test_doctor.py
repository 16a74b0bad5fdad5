"""What 'opgraft plugins doctor' finds: each fault with the place where it is, and nothing where nothing is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft.binding.functional import register_functional, unregister
from opgraft.platforms.cpu.platform import CpuPlatform
from opgraft.plugins.host import load_plugins
from opgraft.testing import diagnosis

HEAD = """
import opgraft, torch
from opgraft.ops import RMSNorm, SiluAndMul
platforms = "any"
"""
HOOK = """
@opgraft.hookimpl
def opgraft_register_ops():
    pass
"""


def doctor(cli, **variables: str) -> tuple[int, list[dict]]:
    """The exit code and the findings."""
    result = cli("plugins", "doctor", "--json", **variables)
    answer = json.loads(result.stdout)
    return result.returncode, answer["findings"]


def line_of(path: Path, text: str) -> str:
    """``file:line`` of the line that holds ``text``."""
    lines = path.read_text().splitlines()
    return f"{path}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def found(check) -> list[str]:
    """What one check finds in this process, in words."""
    load_plugins()
    return [str(finding) for finding in check()]


@pytest.mark.parametrize(
    "group",
    [
        "opgraft.plugin",
        "opgraft_plugins",
        "opgraft.platform",
        "opgrafts.plugins",
        " opgraft.plugins ",
    ],
)
def test_a_misspelt_entry_point_group(cli, site, group: str) -> None:
    """A group that nothing reads and that is nearly one of opgraft's is named, with the right one."""
    site.install(
        "acme", {"acme.py": ""}, {group: ["acme = acme"], "console_scripts": ["acme = acme:main"]}
    )
    code, (finding,) = doctor(cli)
    assert code == 1
    right = "opgraft.platforms" if "platform" in group else "opgraft.plugins"
    assert (
        f"acme 1.0: nothing reads its entry-point group {group!r}: did you mean {right!r}"
        in finding["message"]
    )
    assert finding["provider"] == {"name": "acme", "version": "1.0"}


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("ops explain rms_norm", "plugins: acme (1 of 1 installed plugins active)"),
        ("plugins doctor", "acme (acme 1.0): activated"),
    ],
)
def test_plugins_without_numpy(cold_cli, site, command: str, told: str) -> None:
    """Neither torch nor opgraft requires numpy: where it is not installed plugins load, without a warning of torch."""
    (site.folder / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    site.plugin("acme", HEAD + HOOK)
    result = cold_cli(*command.split())
    assert (result.returncode, result.stderr) == (0, "")
    assert told in result.stdout


LACKING = (
    HEAD
    + """
@opgraft.needs(lambda: {norm})
def norm(self, x, residual=None):
    return RMSNorm.forward_native(self, x, residual)

@opgraft.needs(lambda: {gate})
def gate(self, x):
    return SiluAndMul.forward_native(self, x)

class Norm(RMSNorm):
    forward_oot = norm

class Gate(SiluAndMul):
    forward_oot = gate

@opgraft.hookimpl
def opgraft_register_ops():
    RMSNorm.register_oot(Norm, when={when})
    SiluAndMul.register_oot(Gate)
"""
)


@pytest.mark.parametrize(
    ("fill", "said"),
    [
        (
            {"norm": "'no driver'", "gate": "'no driver'", "when": None},
            "Norm.forward_oot, Gate.forward_oot: no driver",
        ),
        (
            {"norm": "'no driver'", "gate": "'too old'", "when": None},
            "Norm.forward_oot: no driver; Gate.forward_oot: too old",
        ),
        (
            {"norm": "None", "gate": "'no driver'", "when": "lambda platform: False"},
            "Norm.forward_oot: its when= condition is false here; Gate.forward_oot: no driver",
        ),
    ],
)
def test_a_plugin_without_a_kernel_is_one_finding(
    cli, in_one_round, site, causal_folder: Path, fill: dict[str, str], said: str
) -> None:
    """Doctor has one finding, and 'run' one line, for a plugin whose kernels all lack something."""
    site.plugin("acme", LACKING.format(**fill))
    message = f"plugin acme (acme 1.0) has no kernel that can run here: {said}"
    code, (finding,) = doctor(cli)
    assert (code, finding["message"]) == (1, message)
    assert finding["location"] == line_of(site.folder / "acme.py", "class Norm")
    if fill["when"]:  # what 'run' prints is the same text
        asked = ("run", str(causal_folder), "the cat", "--max-tokens", "1", "--compare")
        ran = in_one_round(*asked)
        assert ran.returncode == 0, ran.stderr
        assert ran.stderr.splitlines().count(message) == 1


FOR_CUDA = (
    HEAD
    + """
class Norm(RMSNorm):
    def forward_cuda(self, x, residual=None):
        raise OSError("no device")

    {more}

RMSNorm.register_oot(Norm)
"""
)


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ("forward_hip = forward_cuda", 1),
        ("def forward_oot(self, x, residual=None): return self.forward_native(x, residual)", 0),
        ("forward_hip = forward_cuda\n    def extra_repr(self): return ''", 1),
        ("def train(self, mode=True): return super().train(mode)", 0),
    ],
)
def test_a_plugin_for_another_device(cli, site, causal_folder: Path, more: str, lines: int) -> None:
    """If all kernels of an active plugin are for other devices, 'run' prints one line that says so.

    A class that also overrides other methods changes what runs here, and is not told.
    """
    site.plugin("acme", FOR_CUDA.format(more=more))
    ran = cli("run", str(causal_folder), "the cat", "--max-tokens", "1")
    assert ran.returncode == 0, ran.stderr
    said = [line for line in ran.stderr.splitlines() if "has no kernel that can run here" in line]
    assert len(said) == lines, ran.stderr
    chain = "is not in the dispatch chain of cpu, oot > cpu > native"
    for line in said:
        assert line == (
            "plugin acme (acme 1.0) has no kernel that can run here: "
            f"Norm.forward_cuda: 'cuda' {chain}; Norm.forward_hip: 'hip' {chain}"
        )


def test_a_plugin_with_some_kernels(cli, site, causal_folder: Path) -> None:
    """If one kernel can run, the finding is that of the other, and 'run' prints nothing of it."""
    site.plugin("acme", LACKING.format(norm="None", gate="'no driver'", when=None))
    _, (finding,) = doctor(cli)
    assert finding["message"].startswith("Gate has no kernel that can run here")
    ran = cli("run", str(causal_folder), "the cat", "--max-tokens", "1")
    assert "no kernel" not in ran.stderr


@pytest.mark.parametrize("name", ["opgraft_veto", "opgraft_vetoes"])
def test_a_forgotten_hookimpl(site, name: str) -> None:
    """A function that is named as a hook and not marked is named with file and line; marked ones are not."""
    site.plugin("acme", HEAD + HOOK + f"def {name}(platform):\n    return 'no'\n")
    (finding,) = found(diagnosis.forgotten_marks)
    assert f"{name} is never called: mark it with @opgraft.hookimpl" in finding
    assert line_of(site.folder / "acme.py", f"def {name}") in finding
    assert ("did you mean 'opgraft_veto'" in finding) == (name != "opgraft_veto")


def test_a_veto_is_a_finding(cli, site) -> None:
    """A plugin that refuses, for an old driver say, is not fine."""
    site.plugin(
        "acme",
        HEAD
        + "@opgraft.hookimpl\ndef opgraft_veto(platform):\n    return 'driver 1.0 is too old'\n",
    )
    code, (finding,) = doctor(cli)
    assert code == 1
    assert finding["message"].endswith("is not used, as it vetoed itself: driver 1.0 is too old")


def test_a_device_type_that_torch_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The type and the place of the platform's class are told."""
    assert found(diagnosis.unknown_device_type) == []
    monkeypatch.setattr(CpuPlatform, "device_type", "acme")
    (finding,) = found(diagnosis.unknown_device_type)
    assert "torch cannot use its device_type 'acme'" in finding
    assert "platform.py:" in finding


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            "functional_oot = {'silu_and_mull': fast}",
            "'silu_and_mull', which is no functional form of the op: did you",
        ),
        (
            "functional_cuba = {'silu_and_mul': fast}",
            "functional_cuba belongs to no dispatch key: did you mean",
        ),
        (
            "functional_oot = {'silu_and_mul': narrow}",
            "is narrower than the functional form: the call",
        ),
        ("functional_oot = {'silu_and_mul': fast}", None),
    ],
)
def test_functions_under_a_wrong_name_or_signature(site, table: str, expected: str | None) -> None:
    """A functional name that no op has, a key that is none, a function that takes less: told with their place."""
    source = (
        f"def fast(x):\n    return x\ndef narrow():\n    pass\nclass AcmeSilu(SiluAndMul):\n    {table}\n"
        "    def forward_oot(self, x):\n        return SiluAndMul.forward_native(self, x)\n"
        "SiluAndMul.register_oot(AcmeSilu)\n"
    )
    site.plugin("acme", HEAD + source + HOOK)
    findings = found(diagnosis.wrong_functions)
    if expected is None:
        assert findings == []
        return
    (finding,) = findings
    assert f"AcmeSilu.{table.split()[0]}" in finding
    assert expected in finding
    assert line_of(site.folder / "acme.py", "class AcmeSilu") in finding


@pytest.fixture
def doubled() -> Iterator[object]:
    """A form whose fake rule takes less than the form."""

    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @register_functional(op="silu_and_mul", fake=fake)
    def doubled_for_test(x: torch.Tensor, times: int = 2) -> torch.Tensor:
        return x * times

    yield doubled_for_test
    unregister(doubled_for_test)


def test_a_fake_rule_of_another_signature(doubled) -> None:
    """The form, the call that fails and the place of the fake rule are told; opgraft's own forms have none."""
    (finding,) = found(diagnosis.wrong_fakes)
    assert (
        "the fake rule of the form doubled_for_test is narrower than its native definition: the call"
        in finding
    )
    assert "test_doctor.py:" in finding
    unregister(doubled)
    assert found(diagnosis.wrong_fakes) == []


@pytest.mark.parametrize("op", ["RMSNorm", "SiluAndMul"])
@pytest.mark.parametrize(
    ("mark", "body", "expected"),
    [
        ("", "return super().forward_native(x).detach()", "loses gradients"),
        ("", "return super().forward_native(x.data)", None),
        ("@opgraft.inference_only", "return super().forward_native(x).detach()", None),
        ("", "return super().forward_native(x)", None),
    ],
)
def test_a_kernel_that_detaches(site, op: str, mark: str, body: str, expected: str | None) -> None:
    """A kernel without a backward that is not marked is shown with file and line; marked ones are right."""
    if "x.data" in body:
        expected = (
            "loses gradients" if op == "SiluAndMul" else None
        )  # a norm's weight still requires a gradient
    source = (
        f"class Acme({op}):\n    {mark}\n    def forward_oot(self, x):\n        {body}\n"
        if mark
        else f"class Acme({op}):\n    def forward_oot(self, x):\n        {body}\n"
    )
    if op == "RMSNorm":
        source = source.replace("(self, x)", "(self, x, residual=None)")
    site.plugin("acme", HEAD + source + f"{op}.register_oot(Acme)\n" + HOOK)
    findings = found(diagnosis.lost_gradients)
    assert bool(findings) == (expected is not None), findings
    for finding in findings:
        assert f"Acme.forward_oot {expected}" in finding
        assert line_of(site.folder / "acme.py", "def forward_oot") in finding


@pytest.mark.parametrize(
    ("condition", "check", "silent"),
    [
        ("True", diagnosis.wrong_results, diagnosis.lost_gradients),
        ("torch.is_grad_enabled()", diagnosis.lost_gradients, diagnosis.wrong_results),
    ],
)
@pytest.mark.parametrize("op", ["RMSNorm", "SiluAndMul"])
def test_a_kernel_that_raises(site, op: str, condition: str, check, silent) -> None:
    """A kernel that raises for every input, or only with gradients, is told by one check, and not by the other."""
    rest = ", residual=None" if op == "RMSNorm" else ""
    source = (
        f"class Acme({op}):\n    def forward_oot(self, x{rest}):\n"
        f"        if {condition}:\n            raise OSError('no driver')\n"
        f"        return super().forward_native(x{rest.replace('=None', '')})\n"
    )
    site.plugin("acme", HEAD + source + f"{op}.register_oot(Acme)\n" + HOOK)
    findings = found(check)
    assert findings
    for finding in findings:
        assert "Acme.forward_oot raised OSError: no driver" in finding
        assert line_of(site.folder / "acme.py", "def forward_oot") in finding
    assert found(silent) == []


def test_a_check_of_needs_that_raises(site) -> None:
    """A kernel that can never be chosen, because its own check raises, is told with its place."""
    source = (
        "def check():\n    raise OSError('no driver')\nclass Acme(SiluAndMul):\n    @opgraft.needs(check)\n"
        "    def forward_oot(self, x):\n        return x\nSiluAndMul.register_oot(Acme)\n"
    )
    site.plugin("acme", HEAD + source + HOOK)
    (finding,) = found(diagnosis.broken_needs)
    assert "Acme.forward_oot is never used: its needs() check raised" in finding
    assert line_of(site.folder / "acme.py", "def forward_oot") in finding


RIVAL = """
class {name}(RMSNorm):
    def forward_oot(self, x, residual=None):
        return RMSNorm.forward_native(self, x, residual)
"""


def test_a_conflict_that_providers_has_settled_is_fine(cli, site) -> None:
    """Two plugins for one op are a finding; a setting that chooses one, in any of its spellings, leaves none."""
    for name in ("acme", "brix"):
        site.plugin(
            name,
            HEAD
            + RIVAL.format(name=name.title())
            + f"RMSNorm.register_oot({name.title()})\n"
            + HOOK,
        )
    code, (finding,) = doctor(cli)
    assert code == 1
    assert "2 replacements of RMSNorm have priority 0" in finding["message"]
    assert doctor(cli, OPGRAFT_PROVIDERS='{"rms_norm": "brix"}') == (0, [])
    assert cli("plugins", "doctor", "--providers", "rms_norm=opgraft").returncode == 0
    explained = ("ops", "explain", "rms_norm", "--json")
    answer = json.loads(cli(*explained, OPGRAFT_PROVIDERS="rms_norm=acme").stdout)
    assert answer["decision"]["chosen"] == "Acme.forward_oot"


def test_a_provider_of_one_variant_settles_the_op(site) -> None:
    """A provider that replaces one class of an op may be asked for: the op's other classes stay opgraft's."""
    source = (
        "from opgraft.ops import RotaryEmbedding\nclass Acme(RotaryEmbedding):\n"
        "    def forward_oot(self, positions, query, key=None):\n"
        "        return RotaryEmbedding.forward_native(self, positions, query, key)\n"
        "RotaryEmbedding.register_oot(Acme)\n"
    )
    site.plugin("acme", HEAD + source + HOOK)
    with opgraft.set_config(opgraft.OpgraftConfig(providers={"rotary_embedding": "acme"})):
        assert found(diagnosis.conflicts) == []
    with opgraft.set_config(opgraft.OpgraftConfig(providers={"rotary_embedding": "nobody"})):
        assert any(
            "providers asks for 'nobody'" in finding for finding in found(diagnosis.conflicts)
        )


def test_a_probe_that_raises_is_shown_with_file_and_line(cli, site) -> None:
    """The place is that of the statement in the probe."""
    site.platform("acme", probe="raise OSError('bus error')")
    code, (finding,) = doctor(cli)
    assert code == 1
    assert "raised OSError: bus error" in finding["message"]
    assert line_of(site.folder / "acme_device.py", "raise OSError") in finding["message"]


@pytest.mark.parametrize("fatal", ["os._exit(0)", "os.kill(os.getpid(), 11)", "os.abort()"])
def test_a_plugin_that_ends_the_process_is_named(cli, site, fatal: str) -> None:
    """A plugin whose import ends the process, with status 0 too, is told from the one that does not: exit code 4."""
    site.plugin("acme", f"import os\n{fatal}\n")
    site.plugin("brix", HEAD + HOOK)
    code, findings = doctor(cli)
    assert code == 4
    assert any(f["provider"] and f["provider"]["name"] == "acme" for f in findings)
    assert not any(f["provider"] and f["provider"]["name"] == "brix" for f in findings)
    text = cli("plugins", "doctor").stdout
    assert "plugin 'acme' of acme 1.0 while it was loaded" in text
    assert "the process with" in text
    assert "nothing wrong" not in text


@pytest.mark.parametrize(
    "source",
    [
        "RMSNorm.register_oot(Acme, when=lambda platform: exit(0))\n",
        "RMSNorm.register_oot(Acme)\nAcme.forward_oot = opgraft.needs(lambda: exit(0))(Acme.forward_oot)\n",
    ],
)
def test_an_exit_in_a_condition_is_no_success(cli, site, source: str) -> None:
    """SystemExit in when= or needs() does not end the doctor with 0."""
    site.plugin("acme", HEAD + RIVAL.format(name="Acme") + source + HOOK)
    result = cli("plugins", "doctor")
    assert result.returncode != 0
    assert "SystemExit" in result.stdout


def test_what_plugins_print_does_not_spoil_the_json(cli, site) -> None:
    """A plugin that prints while it is imported leaves one JSON object on stdout."""
    site.plugin("acme", HEAD + "print('hello')\n" + HOOK)
    assert doctor(cli) == (0, [])
