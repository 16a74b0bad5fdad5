"""The distribution: what it is without a compiler, how the host sees it, and how a path is forced from outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Site
from opgraft import ops
from opgraft.ops import RMSNorm
from support.built_kernels import PLUGIN, copy_of_sources, install
from support.own_tests import own_tests

needs_compiler = pytest.mark.skipif(
    not shutil.which("g++"), reason="no g++ to build the kernels with"
)


Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def python(warm_python: str) -> Python:
    """Run Python in a process that sees the plugin."""

    def run(*arguments: str, site: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(site), **variables}
        return subprocess.run(
            [warm_python, *arguments], env=environ, capture_output=True, text=True, check=False
        )

    return run


def explained(python: Python, site: Path, **variables: str) -> str:
    result = python("-m", "opgraft", "ops", "explain", "rms_norm", site=site, **variables)
    assert result.returncode == 0, result.stderr
    return " ".join(result.stdout.split())


@needs_compiler
def test_every_op_is_replaced(plugin: Path) -> None:
    """Each class of the plugin is the one that is constructed, and its kernel is bound.

    Without vectors there is no kernel for linear layers.
    """
    import opgraft_cpu_kernels.ops

    for replacement in opgraft_cpu_kernels.ops.REPLACEMENTS:
        target = getattr(ops, replacement.__name__)
        is_linear = replacement.__name__ in ("Linear", "GatedMLP")
        stays = is_linear and opgraft_cpu_kernels.path() == "scalar"
        expected = target if stays else replacement
        assert ops.maybe_get_oot_by_class(target) is expected
    op = RMSNorm(8)
    assert op.decision.chosen == "opgraft_cpu_kernels.ops:RMSNorm.forward_cpu"
    assert op.op_class is opgraft_cpu_kernels.ops.RMSNorm


@pytest.mark.slow
@needs_compiler
def test_its_own_tests_pass(installed: Path, warm_python: str) -> None:
    """In their short form: registration, values, strides, gradients and compilation of each op."""
    result = own_tests(warm_python, "opgraft-cpu-kernels", installed, "-rp", "--opgraft-brief")
    assert result.returncode == 0, result.stdout + result.stderr
    for case in (
        "(plugin)-registration",
        "rms_norm-values-bfloat16",
        "gelu-gradients",
        "fused_experts-compilation",
    ):
        assert f"::test_conforms[{case}]\n" in result.stdout


@needs_compiler
def test_gradients_take_the_native_definition(plugin: Path) -> None:
    """Training works: where a gradient is required the native definition runs."""
    op, x = RMSNorm(8), torch.randn(3, 8, requires_grad=True)
    op(x).sum().backward()
    assert x.grad is not None
    assert op.weight.grad is not None


@needs_compiler
def test_the_rest_of_the_suite_does_not_see_it() -> None:
    """Without the fixture the plugin is not there."""
    assert RMSNorm(8).op_class is RMSNorm


@needs_compiler
@pytest.mark.parametrize("path", ["avx2", "scalar"])
def test_a_path_is_forced_by_the_environment(python: Python, installed: Path, path: str) -> None:
    """The variable chooses the path before the first call."""
    code = (
        "import opgraft_cpu_kernels as k; print(k.path() if k.missing() is None else k.missing())"
    )
    result = python("-c", code, site=installed, CPU_KERNELS_PATH=path)
    assert result.stdout.strip() == path or "those that this CPU has" in result.stdout


@needs_compiler
def test_a_path_that_is_none(python: Python, installed: Path) -> None:
    """A path by a wrong name is an error of the plugin, which is left out, or stops the program in strict mode."""
    text = explained(python, installed, CPU_KERNELS_PATH="avx1024")
    assert "CPU_KERNELS_PATH: path is 'avx1024', expected one of those that this CPU has" in text
    code = "from opgraft.ops import SiLU; SiLU()"
    strict = python("-c", code, site=installed, CPU_KERNELS_PATH="avx1024", OPGRAFT_STRICT="1")
    assert strict.returncode == 1
    assert "PluginError" in strict.stderr
    assert "path is 'avx1024'" in strict.stderr


@needs_compiler
def test_a_path_without_a_linear_kernel(python: Python, installed: Path) -> None:
    """There opgraft's own linear layer is not replaced; norms are."""
    code = "from opgraft.ops import Linear, SiLU; print(*(op.op_class.__module__ for op in (Linear(2, 2), SiLU())))"
    result = python("-c", code, site=installed, CPU_KERNELS_PATH="scalar")
    assert result.stdout.split() == ["opgraft.ops.linear.modules", "opgraft_cpu_kernels.ops"], (
        result.stderr
    )


@needs_compiler
def test_a_library_for_another_torch(python: Python, installed: Path, tmp_path: Path) -> None:
    """A library is not loaded into a torch that it was not built for."""
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    record = site / "opgraft_cpu_kernels" / "_build.json"
    record.write_text(json.dumps({"torch": "2.8.0", "missing": None}))
    assert f"built for torch 2.8.0, this is {torch.__version__}" in explained(python, site)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "the C++ compiler no-such-compiler was not found"),
        ("false", "does not compile an empty program"),
    ],
)
def test_without_a_compiler(python: Python, tmp_path: Path, compiler: str, reason: str) -> None:
    """Without a compiler that works the installation succeeds; the native definition runs, and the reason is told."""
    result = install(copy_of_sources(tmp_path / "source"), tmp_path / "site", CXX=compiler)
    assert result.returncode == 0, result.stderr
    text = explained(python, tmp_path / "site")
    assert "op rms_norm: opgraft.ops.layernorm.modules:RMSNorm.forward_native" in text
    assert reason in text
    code = "import torch; from opgraft import ops, functional; x = torch.ones(2, 4); functional.silu(ops.RMSNorm(4)(x))"
    ran = python("-c", code, site=tmp_path / "site")
    assert ran.returncode == 0, ran.stderr


def test_a_build_that_fails_is_one_finding(python: Python, tmp_path: Path) -> None:
    """The finding shows the first error of the compiler, and the folder to build the plugin from again."""
    errors = "#error the first error\n#error the second error\n"
    (tmp_path / "broken.h").write_text(errors)
    source, site = copy_of_sources(tmp_path / "source"), tmp_path / "site"
    result = install(source, site, CXXFLAGS=f"-include {tmp_path / 'broken.h'}")
    assert result.returncode == 0, result.stderr
    doctor = python("-m", "opgraft", "plugins", "doctor", "--json", site=site)
    (finding,) = json.loads(doctor.stdout)["findings"]
    assert f"{tmp_path / 'broken.h'}:1:2: error: #error the first error" in finding["message"]
    assert "second error" not in finding["message"]
    assert finding["message"].endswith(f"--no-deps {source}")


FAKE_COMPILER = """#!/bin/sh
echo "$@" >> "$SEEN"
case "$*" in *-fsyntax-only*) exit 0 ;; esac
exit 1
"""


@pytest.mark.parametrize(
    ("names", "option"),
    [
        ("['-std=c++17', '-fPIC'] or ['-std=c++17'] # -std=c++20", "-std=c++17"),
        ("['-std=c++20'] if torch else ['-std=c++17']", "-std=c++20"),
        ("[]", ""),
    ],
)
def test_the_standard_is_that_of_the_torch_in_use(tmp_path: Path, names: str, option: str) -> None:
    """The kernels are compiled by the C++ standard by which the installed torch compiles extensions."""
    files = {
        "__init__.py": "",
        "version.py": "__version__ = '9.9.9'\n",
        "include/ATen/Parallel.h": "",
        "utils/cpp_extension.py": f"common_cflags = {names}\n",
    }
    for name, text in files.items():
        file = tmp_path / "torch" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    compiler, seen = tmp_path / "compiler", tmp_path / "seen"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(0o755)
    variables = {"PYTHONPATH": str(tmp_path), "CXX": str(compiler), "SEEN": str(seen)}
    source, site = copy_of_sources(tmp_path / "source"), tmp_path / "site"
    assert install(source, site, **variables).returncode == 0
    for command in seen.read_text().splitlines():
        assert re.findall(r"-std=\S+", command) == ([option] if option else [])
    record = json.loads((site / "opgraft_cpu_kernels" / "_build.json").read_text())
    assert record["missing"] == f"{compiler} failed: exit status 1"


AGAIN = "build it again by pip install --force-reinstall --no-cache-dir --no-deps "
WHEEL = "the wheel {} has no other library: build it from the plugin's source"
ORIGINS = [
    (None, f"{AGAIN}--no-binary opgraft-cpu-kernels opgraft-cpu-kernels"),
    ({"url": "file:///home/a%20b/k", "dir_info": {}}, f"{AGAIN}'/home/a b/k'"),
    (
        {
            "url": "https://x.example/o.git",
            "vcs_info": {"vcs": "git", "commit_id": "abc"},
            "subdirectory": "reference_plugins/kernels",
        },
        f"{AGAIN}'git+https://x.example/o.git@abc#subdirectory=reference_plugins/kernels'",
    ),
    ({"url": 7}, f"{AGAIN}--no-binary opgraft-cpu-kernels opgraft-cpu-kernels"),
    (["broken"], f"{AGAIN}--no-binary opgraft-cpu-kernels opgraft-cpu-kernels"),
    ({"url": "file:///o/k.whl", "archive_info": {}}, WHEEL.format("/o/k.whl")),
    (
        {"url": "https://x.example/k.whl", "archive_info": {}},
        WHEEL.format("https://x.example/k.whl"),
    ),
]
ASKS = """
import json, sys
from pathlib import Path
from opgraft_cpu_kernels import library
file = Path(sys.argv[1])
for origin in json.loads(sys.argv[2]):
    file.write_text(json.dumps(origin))
    if origin is None:
        file.unlink()
    library.missing.cache_clear()
    print(library.missing())
"""


def test_the_command_that_builds_the_library_again(python: Python, site: Site) -> None:
    """It names the source of the plugin as pip takes it. A wheel, which has one library, is not named again."""
    package = PLUGIN / "src/opgraft_cpu_kernels"
    files = {f"{package.name}/{path.name}": path.read_text() for path in package.glob("*.py")}
    files[f"{package.name}/_build.json"] = json.dumps({"torch": "2.8.0", "missing": None})
    site.install("opgraft-cpu-kernels", files, {})
    (info,) = site.folder.glob("*.dist-info")
    origins = json.dumps([origin for origin, _ in ORIGINS])
    told = python("-c", ASKS, str(info / "direct_url.json"), origins, site=site.folder)
    lines = told.stdout.splitlines()
    assert len(lines) == len(ORIGINS), told.stderr
    for line, (_, words) in zip(lines, ORIGINS, strict=True):
        assert line.startswith("the library was built for torch 2.8.0, this is ")
        assert words in line


@needs_compiler
def test_one_wheel_for_each_python(installed: Path) -> None:
    """The wheel is tagged for any Python 3 and one platform, and holds no sources."""
    [info] = installed.glob("*.dist-info")
    assert info.name == "opgraft_cpu_kernels-0.1.0.dist-info"
    tags = re.findall(r"^Tag: (.+)$", (info / "WHEEL").read_text(), re.MULTILINE)
    assert len(tags) == 1
    assert tags[0].startswith("py3-none-")
    assert tags[0] != "py3-none-any"
    names = [line.partition(",")[0] for line in (info / "RECORD").read_text().splitlines()]
    assert "opgraft_cpu_kernels/_build.json" in names
    assert not [name for name in names if "csrc" in name]
