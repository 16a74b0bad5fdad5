"""A model beside itself on native definitions: what departs, where first, and what is told of it."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from opgraft import graft
from opgraft.binding.comparison import Differences
from opgraft.config import CompilationConfig, OpgraftConfig, set_config
from opgraft.errors import InputError
from opgraft.testing.reproduction import write_case
from opgraft.testing.verification import RepeatableCall, Verification, VerifiedStep, verify
from torch import nn

PLUGIN = """
import torch
from opgraft.ops import GELU, LayerNorm
platforms = "any"

@GELU.register_oot
class AcmeGELU(GELU):
    def forward_oot(self, input):
        out = torch.nn.functional.gelu(input, approximate=self.approximate)
        {wrong}
        return out

@LayerNorm.register_oot
class AcmeNorm(LayerNorm):
    def forward_oot(self, input):
        return torch.nn.functional.layer_norm(input.double(), self.normalized_shape).to(input.dtype) * 1.01
"""


def verified(site, wrong: str) -> Verification:
    """Compare a model of torch's modules with a graft of it, whose GELU does ``wrong`` and whose norm is 1 % off."""
    site.plugin("acme", PLUGIN.format(wrong=wrong))
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 5), nn.GELU(), nn.LayerNorm(5))
    grafted = copy.deepcopy(model)
    graft(grafted)
    inputs = torch.randn(7, 8)
    return verify(model, grafted, lambda _: [VerifiedStep(lambda each: each(inputs))])


def test_each_op_is_called_with_the_native_inputs(site) -> None:
    """An op that is wrong is the first to depart; others answer for themselves only, and each is told of once."""
    found = verified(site, "out = out + 1e-3 * (input.shape[-1] == 5)")
    states = [(place.path, place.served[0].op, bool(place.reason)) for place in found.places[:-1]]
    linear = [("0", "linear", False), ("1", "gelu", False), ("2", "linear", False)]
    assert states == [*linear, ("3", "gelu", True), ("4", "layer_norm", True)]
    assert found.departure is not None
    assert found.departure.place is found.places[3]
    assert found.departure.place.served[0].kernel == "AcmeGELU.forward_oot"
    assert found.departure.inputs[0].startswith("input: float32 [7, 5], from ")
    assert 30 < (found.places[3].error or 0) < 100
    assert (found.places[1].error or 0) <= 1
    assert (found.places[-1].path, found.places[-1].served) == ("", ())


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (
            "out[0] = torch.nan",
            "its result: 6 of 42 numbers are off by more than is allowed: at [0, 0] of float32 [7, 6] it has",
        ),
        ("out = out.double()", "its result is float64 [7, 6], expected float32 [7, 6]"),
        ("out = out[:, :5]", "its result is float32 [7, 5]"),
        ("input.mul_(2)", "it returned or wrote 2 tensors, the native model 1"),
        ("out = None", "it returned or wrote 0 tensors, the native model 1"),
        ("raise ValueError('\\x1b[2J')", r"it raised ValueError: \x1b[2J"),
    ],
)
def test_what_departs_is_told(site, wrong: str, reason: str) -> None:
    """Numbers, dtype, shape, what is written to and what is raised: the reason tells, and the model goes on."""
    found = verified(site, wrong)
    assert found.departure is not None
    assert found.departure.place.path == "1"
    assert found.departure.place.reason.startswith(reason)
    assert [place.path for place in found.places[-2:]] == ["4", ""]


class Whole(nn.Module):
    """A model that keeps what it was given in an object, and may be wrong where no op is."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner, self.dtype, self.wrong = nn.GELU(), dtype, ""

    def forward(self, x: torch.Tensor, cache: SimpleNamespace) -> torch.Tensor:
        cache.kept.append(x)
        out = self.inner(torch.stack(cache.kept).sum(0))
        if self.wrong == "raises":
            raise ValueError("no more")
        return (out + 1 if self.wrong else out).to(self.dtype)


def whole(model: Whole, wrong: str = "") -> Verification:
    """Compare it with a graft of it that is wrong."""
    grafted = copy.deepcopy(model)
    graft(grafted)
    grafted.wrong = wrong
    x = torch.rand(4, 32) * torch.logspace(0, 2, 32)
    return verify(
        model, grafted, lambda _: [VerifiedStep(lambda each: each(x, SimpleNamespace(kept=[x])))]
    )


def test_what_a_model_keeps_is_its_own(site) -> None:
    """A cache in an object of any class is copied, so that the other model does not find what this one has written."""
    found = whole(Whole())
    assert (found.departure, [place.path for place in found.places]) == (None, ["inner", ""])


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [("raises", "it raised ValueError: no more"), ("adds", "its result: 128 of 128")],
)
def test_what_is_wrong_between_ops(site, wrong: str, reason: str) -> None:
    """Where each op is right, the model itself departs: by what it raises, or by what it returns."""
    found = whole(Whole(), wrong)
    assert found.departure is not None
    assert (found.departure.place.path, [bool(place.reason) for place in found.places]) == (
        "",
        [False, True],
    )
    assert found.departure.place.reason.startswith(reason)


class Deep(nn.Module):
    """Sixty-four norms in bfloat16, and a factor that no op applies."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            nn.RMSNorm(32, eps=1e-6, dtype=torch.bfloat16) for _ in range(64)
        )
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = x + norm(x) * 0.1
        return x * self.factor


@pytest.mark.parametrize(("factor", "departs"), [(1.0, False), (1.6, True)])
def test_a_deep_model_may_not_be_off_by_anything(site, factor: float, departs: bool) -> None:
    """Of many ops the roundings that are allowed add up as a random walk does, not one upon the other."""
    model, x = Deep(), torch.randn(4, 32, dtype=torch.bfloat16)
    grafted = copy.deepcopy(model)
    graft(grafted)
    grafted.factor = factor
    found = verify(model, grafted, lambda _: [VerifiedStep(lambda each: each(x))])
    assert (found.departure is not None) == departs


def test_a_call_that_raises_outside_of_the_model(site) -> None:
    """It is told, and is no success, although every module is within its tolerance."""
    model = nn.Sequential(nn.GELU())
    grafted, x = copy.deepcopy(model), torch.randn(3)
    graft(grafted)

    def call(each: nn.Module) -> None:
        if each(x) is not None and each is grafted:
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        verify(model, grafted, lambda _: [VerifiedStep(call)])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_eight_bits(site, dtype: torch.dtype) -> None:
    """They may differ by a step, which is of the number itself: half as much again is found beside a large number."""
    site.plugin("acme", PLUGIN.format(wrong="out[..., :8] *= 1.5"))
    assert whole(Whole(dtype)).places[-1].reason
    near = torch.tensor([1.0, 448.0]).to(dtype)
    step = torch.tensor([1 + torch.finfo(dtype).eps, 448.0]).to(dtype)
    found = RepeatableCall(nn.Identity(), (step,), {}, None, [near], [(0.0, 0.0)]).differences()
    assert (0.9 < (found.error or 0) <= 1, found.reasons) == (True, ())


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (torch.tensor(1 + 2j), torch.tensor(1 + 3j), "it has 2, expected 3"),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]), "it has -2, expected 2"),
        (
            torch.tensor([2**53 + 1]),
            torch.tensor([2**53]),
            "it has 9007199254740993, expected 9007199254740992",
        ),
        (torch.tensor([True, False]), torch.tensor([True, True]), "it has False, expected True"),
    ],
)
def test_numbers_of_every_dtype(ours: torch.Tensor, theirs: torch.Tensor, told: str) -> None:
    """Imaginary parts count, and integers beyond what double precision holds, and truth."""
    allowed = [(1e-5, 1e-5)]
    found = RepeatableCall(nn.Identity(), (ours,), {}, None, [theirs], allowed).differences()
    assert told in found.reasons[0]
    equal = RepeatableCall(
        nn.Identity(), (theirs,), {}, None, [theirs.clone()], allowed
    ).differences()
    assert equal == Differences(0.0, ())


def test_a_model_without_ops(site) -> None:
    """Where nothing is grafted there is nothing to compare, which is an error."""
    model = nn.Sequential(nn.Tanh())
    with pytest.raises(InputError, match="calls no op of opgraft"):
        verify(
            model, copy.deepcopy(model), lambda _: [VerifiedStep(lambda each: each(torch.randn(2)))]
        )


def test_a_departure_is_made_again_alone(site, tmp_path: Path, warm_python: str) -> None:
    """The script runs in a process of its own, gives the same reason, and is content once the plugin is mended."""
    found = verified(site, "out = out + 1e-3")
    assert found.departure is not None
    script = write_case(found.departure, tmp_path / "case", 'a "model"\\', [])
    command = [warm_python, str(script)]
    environ = {**os.environ, "PYTHONPATH": str(site.folder)}
    wrong = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (wrong.returncode, wrong.stdout.splitlines()[-1]) == (1, found.departure.place.reason), (
        wrong.stderr
    )
    assert "called with float32 [7, 6], from " in wrong.stdout
    (site.folder / "acme.py").write_text(PLUGIN.format(wrong="pass"))
    mended = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (mended.returncode, mended.stdout.splitlines()[-1][:21]) == (
        0,
        "within its tolerance:",
    ), mended.stderr


def test_files_are_replaced_whole_and_say_what_is_set(site, tmp_path: Path) -> None:
    """Who has an earlier case open keeps that; settings that choose kernels go into the script, measurements too."""
    found = verified(site, "out = out + 1e-3")
    assert found.departure is not None
    case = write_case(found.departure, tmp_path, "model", []).with_name("case.pt")
    former = tmp_path / "former.pt"
    former.hardlink_to(case)
    with set_config(
        OpgraftConfig(compilation_config=CompilationConfig(tuning_file="/acme/measured.json"))
    ):
        script = write_case(found.departure, tmp_path, "model", [])
    assert not former.samefile(case)
    assert "'compilation_config.tuning_file': '/acme/measured.json'" in script.read_text()


def test_what_cannot_be_saved(site, tmp_path: Path) -> None:
    """A class that cannot be imported cannot be pickled: the error names the place and why."""
    found = verified(site, "out = out + 1e-3")
    assert found.departure is not None

    class Local(nn.GELU):
        pass

    found.departure.call.module.add_module("local", Local())
    with pytest.raises(InputError, match=r"1 cannot be saved, so there is no script: .*Local"):
        write_case(found.departure, tmp_path, "model", [])


def test_a_folder_that_cannot_be_written_to(site, tmp_path: Path) -> None:
    """The error names the folder, and the option that gives another one."""
    found = verified(site, "out = out + 1e-3")
    assert found.departure is not None
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError, match=r"file cannot be written to: .* Name another folder by --save"
    ):
        write_case(found.departure, tmp_path / "file", "model", [])
