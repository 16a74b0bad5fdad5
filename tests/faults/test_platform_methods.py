"""A method of a platform that fails is told by name: one sentence of a command, and a finding of the doctor."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import opgraft
import pytest
import torch
from conftest import Site
from opgraft import LLM, cli, current_platform
from opgraft.plugins import guarded_methods
from opgraft.testing import diagnosis
from support.faults.planting import in_time
from support.faults.platform_rows import METHODS, NEVER_CALLED, method, stated
from support.small_words import word_llama

FEW = ("--max-tokens", "1", "--cache.num_blocks", "300")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random decoder."""
    return word_llama(tmp_path_factory.mktemp("llama"))


def plant(site: Site, source: str) -> None:
    site.platform("acme", probe="return Evidence(True, 'here')", platform=source)


def told(capfd: pytest.CaptureFixture[str], llama: Path) -> tuple[int, str]:
    """The exit code of ``opgraft run``, and what it printed on stderr."""
    opgraft.reset()
    capfd.readouterr()
    with in_time():
        code = cli._run(["run", str(llama), "the cat", *FEW])
    return code, capfd.readouterr().err


@pytest.mark.parametrize("row", METHODS, ids=lambda row: f"{row[0]}: {row[2][:40]}")
def test_methods(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path, row: tuple[str, str, str]
) -> None:
    """The error names platform, distribution, method, file and line; the doctor reports the same once."""
    name, arguments, body = row
    plant(site, method(f"{name}{arguments}", body))
    place = f"{site.folder / 'acme_platform.py'}:"
    if name not in NEVER_CALLED:
        code, said = told(capfd, llama)
        (line,) = [each for each in said.splitlines() if "acme" in each]
        assert "Traceback" not in said, said
        assert code == 4
        assert line.startswith(f"error: platform 'acme' of acme-dist 1.0: its method {name}()")
        assert METHODS[row] in line
        assert place in line
        assert "OPGRAFT_PLUGINS_DISABLE=acme-dist" in line
    findings = [
        each for each in diagnosis.diagnose() if each.provider and each.provider.name == "acme-dist"
    ]
    (finding,) = findings
    assert METHODS[row] in finding.message
    assert (finding.exit_code, (finding.location or "").startswith(place)) == (4, True)


def test_every_method_is_checked() -> None:
    """A method that is added to platforms is guarded, or checked where the platform is loaded."""
    own = vars(opgraft.Platform).items()
    methods = {name for name, value in own if callable(value) and not name.startswith("_")}
    assert methods == {*guarded_methods.CHECKS, "default_config", "prepare"}


def test_a_platform_without_devices(site: Site) -> None:
    """The doctor reports a platform that is available and counts no device; commands go on."""
    plant(site, method("device_count(self)", "return 0"))
    (finding,) = diagnosis.failing_methods()
    assert "its probe says that it is available, and its device_count() returned 0" in str(finding)
    assert f"{site.folder / 'acme_platform.py'}:4" in str(finding)


def test_a_device_without_the_dtype_of_the_checkpoint(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path
) -> None:
    """The error names the platform and the setting, and a dtype that is set is the user's choice."""
    half = "import torch; from opgraft import DeviceCapability as Is; return Is('H', (torch.half,))"
    plant(site, method("capability(self, index=0)", half))
    _, said = told(capfd, llama)
    words = "the checkpoint has float32, and H of the platform acme computes in float16: "
    assert f"{words}set model.dtype, for example model.dtype=float16" in said
    with LLM(str(llama), **{"model.dtype": "float16", "cache.num_blocks": 300}) as llm:
        (output,) = llm.generate([[4, 5]])
    assert output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("named", "used"), [("bfloat16", torch.float16), (None, torch.float32)], ids=str
)
def test_a_dtype_in_place_of_that_of_the_checkpoint(
    caplog: pytest.LogCaptureFixture,
    site: Site,
    llama: Path,
    tmp_path: Path,
    named: str | None,
    used: torch.dtype,
) -> None:
    """One of the same size is taken with a warning; a config without a dtype states none."""
    half = "import torch; from opgraft import DeviceCapability as Is; return Is('H', (torch.half,))"
    plant(site, method("capability(self, index=0)", half))
    folder = Path(shutil.copytree(llama, tmp_path / "narrow"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if not key.endswith("dtype")}
    config |= {"dtype": named} if named else {}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with LLM(str(folder), **{"cache.num_blocks": 300, "load.progress": False}) as llm:
        model = llm.engine.core.executor.worker.runner.model  # type: ignore[union-attr]
        (dtype,) = {each.dtype for each in model.parameters()}
    warned = [each.getMessage() for each in caplog.records if "model.dtype" in each.getMessage()]
    assert dtype is used
    words = "model.dtype is float16 now; model.dtype=bfloat16 keeps the other"
    assert [each.endswith(words) for each in warned] == [True] * bool(named)


@pytest.mark.parametrize("device", ["npuu", "maia"])
def test_a_device_that_torch_cannot_use(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path, device: str
) -> None:
    """The error names the platform and its device_type, and no setting that nobody has set."""
    plant(site, stated("device_type", repr(device)))
    code, said = told(capfd, llama)
    assert code == 4
    assert f"platform 'acme' of acme-dist 1.0: torch cannot use its device_type '{device}'" in said
    assert f"{site.folder / 'acme_platform.py'}:2" in said
    assert "load.device" not in said
    assert "Traceback" not in said
    (finding,) = diagnosis.unknown_device_type()
    assert f"torch cannot use its device_type '{device}'" in str(finding)


@pytest.mark.parametrize(
    "signature", ["default_config(self)", "prepare(self, config)", "memory(self, index=0)"]
)
def test_an_async_method(
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    site: Site,
    llama: Path,
    signature: str,
) -> None:
    """It is told, and Python warns of no coroutine that nobody awaits."""
    plant(site, method(signature, "return None", "async def"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, said = told(capfd, llama)
    said += caplog.text
    assert f"Device.{signature.partition('(')[0]} is an async function, expected a plain" in said
    assert "never awaited" not in said


def test_methods_that_are_right(site: Site, llama: Path) -> None:
    """A platform whose methods call each other and those of its base answers as it would unguarded."""
    plant(site, method("device_count(self)", "return 1 + bool(self.memory(index=0).total < 0)"))
    platform = current_platform()
    assert platform.device_count() == 1
    assert platform.capability(0).dtypes
    assert list(diagnosis.failing_methods()) == []
    with LLM(str(llama), **{"load.progress": False, "cache.num_blocks": 300}) as llm:
        (output,) = llm.generate([[4, 5, 6]])
    assert output.outputs
