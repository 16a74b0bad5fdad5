"""'opgraft new --from-vllm': a plugin of vLLM's kind, ported, installed and called, and sources that are refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import opgraft
import pytest
import tomllib
import torch
from opgraft import load_plugins, ops
from opgraft.errors import InputError
from opgraft.plugins import discovery
from opgraft.plugins.bridges import Ported
from support.vllm_plugin import install_bridge

Port = Callable[[Path], Ported]
SCHEMA = Path(__file__).parents[2] / "docs/reference/schemas/opgraft.new.1.json"

PROJECT = """
[project]
name = "vllm-acme"
version = "0.3.0"
dependencies = ["vllm>=0.11", "packaging"]  # the engine

[project.entry-points."vllm.platform_plugins"]
acme = "vllm_acme:register"

[project.entry-points."vllm.general_plugins"]
acme_ops = "vllm_acme:register_ops"
"""

PACKAGE = """
def register():
    return "vllm_acme.platform.AcmePlatform"


def register_ops():
    from vllm_acme import ops

    ops.register()
"""

PLATFORM = """
from vllm.platforms import Platform, PlatformEnum


class AcmePlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "acme"
    device_type = "cpu"

    @classmethod
    def get_device_name(cls, device_id=0):
        return "Acme N1"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 4 * 2**30

    @classmethod
    def check_and_update_config(cls, vllm_config):
        vllm_config.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"
"""

OPS = """
import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

logger = init_logger(__name__)


def acme_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def _fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


direct_register_custom_op("acme_silu_and_mul", acme_silu_and_mul, fake_impl=_fake)


class AcmeSiluAndMul(SiluAndMul):
    def forward_oot(self, x):
        return torch.ops.vllm.acme_silu_and_mul(x)


@CustomOp.register_oot(name="RMSNorm")
class AcmeRMSNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        if residual is not None or x.device.type != current_platform.device_type:
            return self.forward_native(x, residual)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    def eager(self):
        return get_current_vllm_config().model_config.enforce_eager


def register():
    CustomOp.register_oot(_decorated_op_cls=AcmeSiluAndMul, name="SiluAndMul")
"""

UNCOVERED = [
    ("vllm_acme/ops.py", 3, "vllm.config.get_current_vllm_config"),
    ("vllm_acme/ops.py", 39, "vllm.config.get_current_vllm_config.model_config.enforce_eager"),
    ("vllm_acme/platform.py", 2, "vllm.platforms.PlatformEnum"),
    ("vllm_acme/platform.py", 19, "vllm.platforms.Platform.check_and_update_config"),
    ("vllm_acme/platform.py", 20, "vllm.v1.worker.cpu_worker.CPUWorker"),
]


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The source of a plugin for vLLM."""
    folder = tmp_path / "vllm-acme"
    (folder / "vllm_acme").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    for name, text in {"__init__": PACKAGE, "platform": PLATFORM, "ops": OPS}.items():
        (folder / f"vllm_acme/{name}.py").write_text(text)
    return folder


def test_a_ported_plugin_runs(port: Port, site: Any, plugin: Path) -> None:
    """Installed, its platform is chosen and its ops are those that run, one of them as a torch op of its own."""
    made = port(plugin)
    project = tomllib.loads(made.files["pyproject.toml"].decode())["project"]
    assert project["dependencies"] == ["packaging", "opgraft>=0.1,<0.2"]
    points = {
        group: [f"{a} = {b}" for a, b in table.items()]
        for group, table in project["entry-points"].items()
    }
    assert points == {
        "opgraft.platforms": ["acme = vllm_acme.opgraft_device:SPEC"],
        "opgraft.plugins": ["acme_ops = vllm_acme.opgraft_plugin"],
    }
    site.install("vllm-acme", {name: text.decode() for name, text in made.files.items()}, points)
    load_plugins()
    assert opgraft.current_platform().name == "acme"
    assert [offer.name for offer in discovery.discover().offers if not offer.built_in] == [
        "acme",
        "acme_ops",
    ]
    norm, gate = ops.RMSNorm(16), ops.SiluAndMul()
    assert [op.decision.chosen for op in (norm, gate)] == [
        "AcmeRMSNorm.forward_oot",
        "AcmeSiluAndMul.forward_oot",
    ]
    x = torch.randn(3, 16)
    with torch.no_grad(), torch.profiler.profile() as profile:
        torch.testing.assert_close(norm(x), norm.forward_native(x))
        torch.testing.assert_close(gate(x), gate.forward_native(x))
    assert "opgraft::acme_silu_and_mul" in {event.name for event in profile.events()}
    with pytest.raises(NameError, match="get_current_vllm_config"):
        norm.eager()


def test_what_has_no_counterpart_is_listed(
    cli: Any, site: Any, plugin: Path, tmp_path: Path
) -> None:
    """By file and line, in JSON, on the terminal and in PORTING.md; each stands below a comment."""
    install_bridge(site)
    told = cli("new", "--from-vllm", str(plugin), "--output", str(tmp_path / "a"), "--json")
    report = json.loads(told.stdout)
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    assert [(one["file"], one["line"], one["name"]) for one in report["uncovered"]] == UNCOVERED
    folder = Path(report["folder"])
    assert folder == tmp_path / "a" / "opgraft-acme"
    assert sorted(report["files"]) == sorted(
        p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()
    )
    printed = cli(
        "new", "named", "--from-vllm", str(plugin), "--output", str(tmp_path / "a")
    ).stdout
    assert "opgraft-named" in printed
    guide = (folder / "PORTING.md").read_text()
    marked = "".join((folder / f"vllm_acme/{name}.py").read_text() for name in ("ops", "platform"))
    for file, line, name in UNCOVERED:
        assert f"{file}:{line}: {name}" in printed
        assert f"| `{file}:{line}` | `{name}` |" in guide
    assert marked.count("# opgraft: no counterpart: ") == len(UNCOVERED)


def test_a_setup_script_is_read_and_not_run(port: Port, plugin: Path) -> None:
    """Its entry points and requirements are those of opgraft, the rest of it is as it was."""
    (plugin / "pyproject.toml").write_text("[build-system]\nrequires = ['setuptools']\n")
    begin = "from setuptools import setup\nraise SystemExit('run')\nsetup(\n    name='vllm-acme',\n"
    entries = "{'console_scripts': ['a = b:c'], 'vllm.general_plugins': ['acme = vllm_acme:register_ops']}"
    script = (
        f"{begin}    install_requires=['vllm == 0.11', 'numpy'],\n    entry_points={entries},\n)\n"
    )
    (plugin / "setup.py").write_text(script)
    made = port(plugin)
    text = made.files["setup.py"].decode()
    assert text.startswith(begin)
    assert "vllm == " not in text
    assert "vllm.general_plugins" not in text
    assert "['numpy', \"opgraft>=0.1,<0.2\"]" in text
    assert (
        "'console_scripts': ['a = b:c'], \"opgraft.plugins\": [\"acme = vllm_acme.opgraft_plugin\"]"
        in text
    )
    assert b'platforms = "any"' in made.files["vllm_acme/opgraft_plugin.py"]
    (plugin / "setup.py").write_text(f"{begin}    entry_points=made(),\n)\n")
    with pytest.raises(InputError, match="no dictionary that can be read without running it"):
        port(plugin)


def write(path: str, content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / path).write_bytes(data)


BAD = "vllm_acme/bad.py"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a syntax error": (write(BAD, "x = 1\ndef f(:\n"), r"vllm_acme/bad.py:2: cannot be parsed"),
    "bytes that are no text": (
        write(BAD, b"x = '\xff\xfe'\n"),
        "vllm_acme/bad.py.*cannot be parsed",
    ),
    "a null byte": (write(BAD, b"x = 1\x00\n"), "vllm_acme/bad.py.*cannot be parsed"),
    "deep nesting": (
        write(BAD, "x = " + "(" * 5000 + ")" * 5000),
        "vllm_acme/bad.py.*cannot be parsed",
    ),
    "a long chain": (write(BAD, "x = 1" + "+1" * 50_000), "vllm_acme/bad.py.*cannot be parsed"),
    "a shorter one": (write(BAD, "x = 1" + "+1" * 600), "vllm_acme/bad.py.*nested too deeply"),
    "a huge file": (write(BAD, b"#" * ((1 << 20) + 1)), "bad.py has more than 1 MiB"),
    "a link that leads out": (
        lambda f: (f / "passwd").symlink_to("/etc/passwd"),
        "passwd is a link that leads out of",
    ),
    "a link to a folder": (lambda f: (f / "all").symlink_to("/etc"), "all is a link to a folder"),
    "no entry points": (
        write("pyproject.toml", '[project]\nname = "a"\n'),
        "no entry points of vLLM",
    ),
    "no project": (write("pyproject.toml", "[tool.x]\n"), "no entry points of vLLM"),
    "no TOML": (write("pyproject.toml", "[project\n"), "pyproject.toml cannot be read"),
    "entry points of no kind": (
        write("pyproject.toml", "[project]\nentry-points = 3\n"),
        "cannot be read",
    ),
    "no function": (
        write("pyproject.toml", PROJECT.replace(":register_ops", "")),
        "expected module:function",
    ),
    "no such module": (
        write("pyproject.toml", PROJECT.replace("vllm_acme:", "other:")),
        "names the module 'other'",
    ),
    "a guide already": (write("PORTING.md", ""), "has a PORTING.md"),
    "a hook already": (
        write("vllm_acme/opgraft_plugin.py", ""),
        "has a file vllm_acme/opgraft_plugin.py",
    ),
    "a name with a quote": (
        write("pyproject.toml", PROJECT.replace("acme =", """'a"b' =""")),
        "is no name: use letters",
    ),
    "dotted keys": (
        write(
            "pyproject.toml",
            '[project]\nentry-points."vllm.general_plugins".a = "vllm_acme:register_ops"\n',
        ),
        "write them as tables",
    ),
    "a requirement alone": (
        write("pyproject.toml", f"{PROJECT[: PROJECT.index('dep')]}dependencies = 'vllm'\n"),
        "no list",
    ),
    "a kind of dynamic": (
        write("pyproject.toml", "[project]\ndynamic = 3\n"),
        "project.dynamic is no list of texts",
    ),
    "no project file": (
        lambda f: (f / "pyproject.toml").unlink(),
        "no pyproject.toml and no setup.py",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(port: Port, plugin: Path, name: str) -> None:
    """The message says which file, what is wrong with it and what to do."""
    spoil, message = REFUSED[name]
    spoil(plugin)
    with pytest.raises(InputError, match=message):
        port(plugin)


def test_nothing_is_written_where_it_cannot_be(
    cli: Any, site: Any, plugin: Path, tmp_path: Path
) -> None:
    """Neither over a folder, nor into the plugin; and without the libraries the extra is named."""
    install_bridge(site)
    (tmp_path / "opgraft-acme").mkdir()
    for arguments, message in {
        (str(plugin),): "is there already",
        (str(plugin), "--output", str(plugin)): "lies in the plugin that is read",
        (str(tmp_path / "none"),): "is no folder",
    }.items():
        told = cli("new", "--from-vllm", *arguments)
        assert (told.returncode, message in told.stderr) == (2, True), told.stderr
    assert cli("new").returncode == 2
    (site.folder / "libcst.py").write_text("raise ImportError('no module named libcst')")
    told = cli("new", "--from-vllm", str(plugin), "--output", str(tmp_path / "b"))
    assert (told.returncode, "the bridge with its extra 'port'" in told.stderr) == (2, True)
    assert not list((tmp_path / "opgraft-acme").iterdir())


def test_the_bridge_ports_if_it_is_installed_and_admitted(
    cli: Any, site: Any, plugin: Path, tmp_path: Path
) -> None:
    """Without the bridge, the message names what to install. The deny list and a broken bridge are named."""
    arguments = ["new", "--from-vllm", str(plugin), "--output", str(tmp_path / "a")]
    told = cli(*arguments)
    assert told.returncode == 2
    assert "pip install './reference_plugins/opgraft-vllm-bridge[port]'" in told.stderr.replace(
        "\n", " "
    )
    install_bridge(site)
    # An allow list names plugins. Whoever asks for a port has asked for the bridge.
    assert cli(*arguments, OPGRAFT_PLUGINS="opgraft-vllm-bridge").returncode == 0
    told = cli(*arguments, "again", OPGRAFT_PLUGINS_DISABLE="opgraft-vllm-bridge")
    assert (told.returncode, "on the deny list" in told.stderr) == (2, True), told.stderr
    (site.folder / "opgraft_vllm_bridge/offers.py").write_text("raise RuntimeError('damaged')\n")
    told = cli(*arguments, "again")
    assert (told.returncode, "damaged" in told.stderr) == (4, True), told.stderr
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["opgraft-acme"]


def test_requirements_that_stay_are_listed(port: Port, plugin: Path) -> None:
    """By the original's lines, in files of all kinds; so is a list that opgraft could not be added to."""
    extras = '\n[project.optional-dependencies]\nname = ["numpy"]\nvllm = [\n  "torch",\n  "vllm>=0.11",\n]\n'
    extras += '[dependency-groups]\ntest = ["vllm>=0.11"]\n'
    (plugin / "pyproject.toml").write_text(PROJECT + extras)
    (plugin / "setup.cfg").write_text(
        "[options]\ninstall_requires =\n    vllm==0.11\n[x]\nname = vllm\nurl = vllm-x\n"
    )
    (plugin / "requirements-dev.txt").write_text("numpy\nvllm-tests\nvllm [a] >= 0.9  # here\n")
    name, line = "the requirement of vllm", (PROJECT + extras).count("\n")
    found = {(one.file, one.line, one.name) for one in port(plugin).uncovered}
    assert found - set(UNCOVERED) == {
        ("pyproject.toml", line - 3, name),
        ("pyproject.toml", line, name),
        ("setup.cfg", 3, name),
        ("setup.cfg", 5, name),
        ("requirements-dev.txt", 3, name),
    }
    (plugin / "pyproject.toml").write_text(
        PROJECT.replace("dependencies = [", 'dynamic = ["dependencies"]\nx = [')
    )
    assert ("pyproject.toml", 5, "dynamic dependencies") in {
        (one.file, one.line, one.name) for one in port(plugin).uncovered
    }


@pytest.mark.parametrize(
    ("requirements", "left"),
    [
        ('reqs() + ["vllm>=0.9"]', {(9, "install_requires"), (9, "the requirement of vllm")}),
        ('["vllm>" "=0.9", "numpy"]', set()),
        ('["numpy", f"vllm=={VERSION}"]', {(9, "the requirement of vllm")}),
        (None, {(4, "install_requires")}),
    ],
)
def test_a_setup_script_is_told_of_by_its_own_lines(
    port: Port, plugin: Path, requirements: str | None, left: set[Any]
) -> None:
    """What stands behind its requirements and entry points keeps its line, and the file its encoding."""
    (plugin / "pyproject.toml").unlink()
    given = f"install_requires={requirements}" if requirements else ""
    script = f"""# coding: latin-1
import vllm.envs
from setuptools import setup
setup(
    name="vllm", author="Zoë", keywords=["vllm"],
    entry_points={{
        "vllm.general_plugins": ["acme = vllm_acme:register_ops"],
    }},
    {given}{"," if given else ""}
    extras_require={{"vllm": ["vllm<1"]}},
)
print(vllm.envs.FOO, "vllm.\\u4e2d")
"""
    (plugin / "setup.py").write_bytes(script.encode("latin-1"))
    made = port(plugin)
    assert {(one.line, one.name) for one in made.uncovered if one.file == "setup.py"} == left | {
        (2, "vllm.envs"),
        (10, "the requirement of vllm"),
        (12, "vllm.envs.FOO"),
        (12, "vllm.\u4e2d"),
    }
    text = made.files["setup.py"].decode("latin-1")
    assert 'author="Zoë"' in text
    assert ("opgraft>=0.1" in text) == ((9 if given else 4, "install_requires") not in left)


def test_a_copy_is_whole_or_not_there(
    cli: Any, site: Any, plugin: Path, tmp_path: Path, warm_python: str
) -> None:
    """A file that cannot be written leaves no folder behind, and executable files stay so."""
    install_bridge(site)
    (plugin / "run.sh").write_text("#!/bin/sh\n")
    (plugin / "run.sh").chmod(0o755)
    # Without byte code, of which the limit would leave half a file for the next process.
    command = "import resource, runpy, sys; sys.dont_write_bytecode = True; "
    command += "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)); "
    command += "sys.argv[0] = 'opgraft'; runpy.run_module('opgraft', run_name='__main__')"
    arguments = ["new", "--from-vllm", str(plugin), "--output", str(tmp_path / "a")]
    told = subprocess.run(
        [warm_python, "-c", command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(site.folder)},
    )
    assert (told.returncode, "cannot be written: File too large" in told.stderr) == (2, True), (
        told.stderr
    )
    assert not list((tmp_path / "a").iterdir())
    assert cli(*arguments).returncode == 0
    copy = tmp_path / "a/opgraft-acme"
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
    modes = {name: (copy / name).stat().st_mode & 0o777 for name in ("run.sh", "pyproject.toml")}
    assert modes == {name: (plugin / name).stat().st_mode & 0o777 for name in modes}
    assert modes["run.sh"] == 0o755
