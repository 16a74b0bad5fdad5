"""A kernel of a plugin that makes a model fail is named, with its file and line, and the model is not blamed."""

from __future__ import annotations

from pathlib import Path

import opgraft
import pytest
from conftest import Site
from faults.model_rows import CONTENTS
from faults.test_models import copied
from opgraft import cli
from opgraft.ops import RMSNorm
from small_words import word_llama
from torch import nn

transformers = pytest.importorskip("transformers")

BLOCKS = ("--cache.num_blocks", "300")


def kernel(op: str, arguments: str, body: str) -> str:
    """A plugin that replaces an op by a class with one kernel, or another method."""
    return (
        f"import opgraft, torch\nfrom opgraft.ops import {op}\nplatforms = 'any'\n"
        f"class Acme({op}):\n    def {arguments}:\n        {body}\n"
        f"{op}.register_oot(Acme)\n"
    )


NORM = "forward_oot(self, x, residual=None)"
NAN_NORM = kernel(
    "RMSNorm",
    NORM,
    "made = RMSNorm.forward_native(self, x, residual)\n"
    "        return tuple(t * torch.nan for t in made) if residual is not None else made * torch.nan",
)
NAN_LAYER_NORM = kernel("LayerNorm", "forward_oot(self, x)", "return x * torch.nan")
INFINITE_GATE = kernel(
    "SiluAndMul", "forward_oot(self, x)", "return x[..., : x.shape[-1] // 2] / 0"
)
RAISING_NORM = kernel("RMSNorm", NORM, "raise OSError('no device')")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random decoder."""
    return word_llama(tmp_path_factory.mktemp("llama"))


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code of the command line in this process, and what it printed on stderr."""
    opgraft.reset()
    capfd.readouterr()
    code = cli._run(arguments)
    return code, capfd.readouterr().err


def place(site: Site) -> str:
    return f"at {site.folder / 'acme.py'}:"


@pytest.mark.parametrize("source", [NAN_NORM, INFINITE_GATE], ids=["a norm", "a gate"])
@pytest.mark.parametrize("options", [(), ("--compare",)], ids=["run", "compare"])
def test_numbers_of_a_decoder(
    capfd: pytest.CaptureFixture[str],
    site: Site,
    llama: Path,
    source: str,
    options: tuple[str, ...],
) -> None:
    """The first kernel whose result differs from its native definition is told, not that weights are damaged."""
    site.plugin("acme", source)
    code, said = run(capfd, "run", str(llama), "the cat", *options, *BLOCKS)
    assert code == 2, said
    assert "Acme.forward_oot of acme 1.0" in said, said
    assert place(site) in said
    assert "to go without it: " in said
    assert "weights are damaged" not in said


@pytest.mark.parametrize("options", [(), ("--compare",)], ids=["run", "compare"])
def test_numbers_of_an_encoder(
    capfd: pytest.CaptureFixture[str], site: Site, encoder: Path, options: tuple[str, ...]
) -> None:
    """The same of vectors; the exit code is that of a plugin's failure."""
    site.plugin("acme", NAN_LAYER_NORM)
    code, said = run(capfd, "run", str(encoder), "the cat", "a dog", *options)
    assert code == 4, said
    assert "Acme.forward_oot of acme 1.0" in said, said
    assert place(site) in said
    assert "weights are damaged" not in said


def test_weights_that_are_damaged(
    capfd: pytest.CaptureFixture[str], site: Site, llama: Path, tmp_path: Path
) -> None:
    """Beside a kernel in order the weights are blamed."""
    folder = copied(llama, tmp_path)
    CONTENTS["weights that are no numbers"][0](folder)
    site.plugin("acme", kernel("RMSNorm", NORM, "return RMSNorm.forward_native(self, x, residual)"))
    _, said = run(capfd, "run", str(folder), "the cat", *BLOCKS)
    assert "weights are damaged" in said
    assert "acme" not in said


def test_a_kernel_that_raises(capfd: pytest.CaptureFixture[str], site: Site, llama: Path) -> None:
    """Exit code 4 and one sentence with plugin, file and line; ``--traceback`` shows the calls, wherever it stands."""
    site.plugin("acme", RAISING_NORM)
    code, said = run(capfd, "run", str(llama), "the cat", *BLOCKS)
    lines = [line for line in said.splitlines() if "acme" in line]
    assert (code, len(lines)) == (4, 1), said
    assert lines[0].startswith("error: OSError: no device, raised in op rms_norm, by Acme.")
    assert place(site) in lines[0]
    assert "Traceback" not in said
    for arguments in (("--traceback", "run"), ("run", "--traceback")):
        code, said = run(capfd, *arguments, str(llama), "the cat", *BLOCKS)
        assert code == 4
        assert "Traceback (most recent call last)" in said
        assert "error: OSError: no device, raised in op rms_norm" in said


def test_graft_names_the_plugin_whose_class_raises(site: Site) -> None:
    """The report says who raised in the constructor, not which adapter called it."""
    source = kernel("LayerNorm", "__init__(self, *args, **kwargs)", "raise OSError('no device')")
    site.plugin("acme", source)
    report = opgraft.graft(nn.Sequential(nn.LayerNorm(8)))
    (row,) = report.left_alone
    assert row.reason.startswith("OSError: no device, raised in op layer_norm, by Acme.__init__ of")
    assert place(site).removeprefix("at ") in row.reason


def test_a_constructor_that_forgets_its_base(site: Site) -> None:
    """An op without ``super().__init__()`` is told with its class, file and line when it is constructed."""
    site.plugin(
        "acme", kernel("RMSNorm", "__init__(self, *args, **kwargs)", "self.hidden_size = 8")
    )
    with pytest.raises(opgraft.errors.OpgraftError, match=r"Acme.*super\(\).__init__\(\)") as told:
        RMSNorm(8)
    assert f"{site.folder / 'acme.py'}:" in str(told.value)
