"""Choices by measurement: ``custom_ops`` ``auto`` follows what was measured here, and says why where it does not."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig, OpgraftConfig, set_config
from opgraft.binding import measurements
from opgraft.binding.measurements import OpMeasurement, ProfileFile, TimedChoice, read_profile
from opgraft.errors import InputError
from opgraft.ops import ReLUSquaredActivation, RotaryEmbedding
from opgraft.plugins.discovery import discover
from opgraft.registry.decision import Decision, Provider
from opgraft.testing import tuning

SECONDS = 1e-4
NAP = 0.01
"""Far longer than the native definition takes."""

MINE = __name__.partition(".")[0]
"""By which the replacements here are chosen: the top-level module that they are of."""

SHAPES = ("relu2 1x5120 float32", "relu2 16x5120 float32", "relu2 512x5120 float32")


class Slow(ReLUSquaredActivation):
    """A kernel that no machine is fast enough for."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP)
        return self.forward_native(x)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A file of measurements, which says that the native definition of relu2 is best here."""
    ReLUSquaredActivation.register_oot(Slow)
    path = tmp_path / "folder" / "tuning.json"
    write(path)
    opgraft.reset()
    ReLUSquaredActivation.register_oot(Slow)
    with set_config(auto(path), origin="a block"):
        yield path


def auto(path: Path, custom_ops: str = "auto", **settings: Any) -> OpgraftConfig:
    compilation = CompilationConfig(custom_ops=[custom_ops], tuning_file=str(path), **settings)
    return OpgraftConfig(compilation_config=compilation)


def write(path: Path) -> None:
    """Add to a file that ``Slow`` takes a thousand times as long."""
    (race,), _ = tuning.races(["relu2"])
    times = {
        choice: dict.fromkeys(SHAPES, seconds)
        for choice, seconds in ((MINE, 2e-3), ("native", 2e-6))
    }
    ProfileFile(path).add({race.name: tuning.best_of(race, times, {})})


def measurement(op: Any) -> Decision:
    """The part of an op's decision that tells of measurements."""
    (part,) = [part for part in op.decision.parts if part.subject.startswith("measurement of ")]
    return part


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    change(content["machines"][0])
    path.write_text(json.dumps(content))


def test_auto_takes_the_fastest_and_quotes_the_figures(file: Path) -> None:
    """A kernel that is slower than the native definition is passed over, and every record of that has the numbers."""
    op = ReLUSquaredActivation()
    assert str(op.binding.kernel.winner) == "ReLUSquaredActivation.forward_native"
    assert not ReLUSquaredActivation.enabled()
    assert f"measured: native 2 µs, {MINE} 2 ms in the mean of 3 shapes" in op.decision.reason
    part = measurement(op)
    assert part.chosen == "native"
    assert re.search(
        rf"'auto' in custom_ops \(a block\); measured 2.* UTC with .* thread.*, {file}", part.reason
    )
    slow, native = part.candidates
    assert (slow.accepted, native.accepted) == (False, True)
    assert (slow.reason, native.reason) == (
        "2 ms in the mean, 1000.00 of the time of native",
        "2 µs in the mean",
    )


def test_what_is_slow_is_measured_to_be_slow() -> None:
    """Candidates are timed on the same shapes; one that sleeps takes at least as long as it sleeps."""
    ReLUSquaredActivation.register_oot(Slow)
    (race,), left_out = tuning.races(["relu2"])
    outcome = tuning.run(race, [torch.float32], SECONDS)
    assert outcome.measured is not None
    slow, native = outcome.measured.candidates
    assert [slow.choice, native.choice, outcome.measured.chosen] == [MINE, "native", "native"]
    assert (slow.seconds.keys(), native.seconds.keys()) == (set(SHAPES), set(SHAPES))
    assert min(slow.seconds.values()) > NAP
    assert (left_out, outcome.left_out) == ({}, {})


def test_forms_and_existing_models_follow_too(file: Path) -> None:
    """The functional form runs what the module is bound to, and rebind changes a model that was built before."""
    with set_config(auto(file, "all")):
        model = torch.nn.Sequential(ReLUSquaredActivation())
    assert model[0].op_class is Slow
    (row,) = opgraft.rebind(model)
    assert (row.before, row.after) == ("Slow.forward_oot", "ReLUSquaredActivation.forward_native")
    assert "measured: native" in str(opgraft.explain(model))


def test_ops_of_other_processes_follow_too(file: Path) -> None:
    """An op keeps its class and runs the native definition where that is best; where it is chosen by hand it does not.

    A worker that unpickles what runs natively here has it run natively as well.
    """
    with set_config(auto(file, "all")):
        saved = pickle.dumps(ReLUSquaredActivation())
    op = pickle.loads(saved)  # noqa: S301  # its own bytes
    assert (op.op_class, op.binding.kernel.winner.key) == (Slow, "native")
    assert measurement(op).chosen == "native"
    with set_config(OpgraftConfig(providers={"relu2": MINE})):
        assert str(pickle.loads(saved).binding.kernel.winner) == "Slow.forward_oot"  # noqa: S301
    with set_config(OpgraftConfig(providers={"relu2": "native"})):
        assert pickle.loads(saved).binding.kernel.winner.key == "native"  # noqa: S301


def test_an_own_kernel_that_is_slower_stays_off(file: Path, scale) -> None:
    """An op whose native definition is faster than its own kernel runs that as constructed and as unpickled."""
    own = discover().provider_of(scale.__module__)
    rows = TimedChoice("native", own, "", {"1": 2e-6}), TimedChoice(own.name, own, "", {"1": 4e-6})
    ProfileFile(file).add({"scale": OpMeasurement("native", torch.get_num_threads(), "now", rows)})
    op = scale()
    assert op.binding.kernel.winner.key == "native"
    assert pickle.loads(pickle.dumps(op)).binding.kernel.winner.key == "native"  # noqa: S301  # its own bytes


@pytest.mark.parametrize(
    ("config", "kernel"),
    [
        (OpgraftConfig(providers={"relu2": MINE}), "Slow.forward_oot"),
        (
            OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["auto", "+relu2"])),
            "Slow.forward_oot",
        ),
        (
            OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["auto", "-relu2"])),
            "ReLUSquaredActivation.forward_native",
        ),
    ],
)
def test_a_choice_by_hand_counts_before_a_measurement(
    file: Path, config: OpgraftConfig, kernel: str
) -> None:
    """An op that a setting names is left to that setting, and no measurement stands in its decision."""
    with set_config(config):
        op = ReLUSquaredActivation()
    assert str(op.binding.kernel.winner) == kernel
    assert "measured" not in str(op.decision)


def test_no_measurement_is_read_unless_it_is_asked_for(file: Path) -> None:
    """Without 'auto' the file plays no part, whatever it holds."""
    file.write_bytes(b"\xff")
    with set_config(auto(file, "all")):
        op = ReLUSquaredActivation()
    assert op.op_class is Slow
    assert "measured" not in str(op.decision)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda row: row["setup"].update(device="Ascend 910B"),
            r"of other machines \(Ascend 910B\), this one has .*",
        ),
        (
            lambda row: row["setup"].update(torch="2.1.0"),
            r"measured with torch 2\.1\.0, here is .*: .* measures .* anew",
        ),
        (
            lambda row: row["setup"].update(driver="550.1"),
            r"measured with driver 550\.1, here is none",
        ),
        (
            lambda row: row["setup"].update(opgraft="0.0.1"),
            r"measured with opgraft 0\.0\.1, here is",
        ),
        (lambda row: row["ops"].clear(), "it was not measured: 'opgraft tune relu2' does"),
        (
            lambda row: row["ops"]["relu2"]["candidates"][0]["provider"].update(version="9"),
            f"measured were native .*, {MINE} 9, here are native .*, {MINE}: 'opgraft tune relu2'",
        ),
        (
            lambda row: row["ops"]["relu2"]["candidates"][0].update(choice="gone"),
            f"measured were gone, native .*, here are native .*, {MINE}",
        ),
        (
            lambda row: row["ops"]["relu2"].update(threads=torch.get_num_threads() + 1),
            r"measured with (\d+) threads, here are (\d+): 'OMP_NUM_THREADS=\2 opgraft tune relu2' measures",
        ),
    ],
)
def test_measurements_of_something_else_are_not_followed(file: Path, change, reason: str) -> None:
    """Of another machine, version or set of candidates: the op runs what it would, and the decision says why."""
    edit(file, change)
    op = ReLUSquaredActivation()
    assert op.op_class is Slow
    assert measurement(op).chosen is None
    assert re.search(f"'auto' in custom_ops .a block., but .*{reason}", measurement(op).reason)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no file .*: 'opgraft tune' measures here"),
        (
            b"",
            "cannot be used: JSONDecodeError.*: remove the file and tune anew, or name another by",
        ),
        (b"\xff\xfe", "cannot be used: (JSON|Unicode)DecodeError"),
        (b"[" * 100_000, "cannot be used: RecursionError"),
        (
            b'{"schema": "opgraft.lock/1"}',
            "cannot be used: .* no object of the schema 'opgraft.tuning/1'",
        ),
        (b'{"schema": "opgraft.tuning/1"}', "cannot be used: KeyError"),
        (
            b'{"schema": "opgraft.tuning/1", "machines": [{"setup": 1}]}',
            "cannot be used: TypeError",
        ),
        (b" " * (1 << 24) + b"{}", "cannot be used: .* larger than"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    file: Path, caplog, content: bytes | None, reason: str
) -> None:
    """A damaged file stops nothing: one warning, and the reason in each decision."""
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    first, second = ReLUSquaredActivation(), RotaryEmbedding(8, 8, 16, 1e4, True, torch.float32)
    assert (first.op_class, second.op_class) == (Slow, RotaryEmbedding)
    assert re.search(reason, measurement(first).reason)
    assert measurement(second).reason == measurement(first).reason
    assert [bool(re.search(reason, record.getMessage())) for record in caplog.records] == [True]


@pytest.mark.parametrize(
    "seconds", ["NaN", "Infinity", "0", "-1", '"fast"', "null", "1" + 400 * "0"]
)
def test_times_that_are_none_are_refused(file: Path, seconds: str) -> None:
    """A figure that no clock gives makes the file unusable, rather than a choice that nobody can explain."""
    text = re.sub(r'(1x5120 float32": )[^,\n]+', rf"\g<1>{seconds}", file.read_text(), count=1)
    assert text != file.read_text()
    file.write_text(text)
    op = ReLUSquaredActivation()
    assert op.op_class is Slow
    assert "cannot be used" in measurement(op).reason


def test_threads_that_are_none_are_refused(file: Path) -> None:
    """JSON of Python has numbers that no count is; a constructor survives them."""
    edit(file, lambda row: row["ops"]["relu2"].update(threads=math.inf))
    op = ReLUSquaredActivation()
    assert op.op_class is Slow
    assert "cannot be used: OverflowError" in measurement(op).reason


def test_a_pipe_or_a_folder_holds_nobody_up(file: Path) -> None:
    """What is no regular file is not read, and not written over."""
    file.unlink()
    os.mkfifo(file)
    assert "it is no regular file" in measurement(ReLUSquaredActivation()).reason
    with pytest.raises(InputError, match="it is no regular file"):
        ProfileFile(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(InputError, match="cannot be used: Is a directory"):
        ProfileFile(file)


def test_a_compiler_that_fuses_native_definitions_is_left_to_do_so(file: Path) -> None:
    """Where custom_ops defaults to none, measurements of single ops say nothing."""
    with set_config(auto(file, mode="STOCK_TORCH_COMPILE")):
        op = ReLUSquaredActivation()
    assert not op.binding.kernel.enabled
    assert "backend inductor compiles" in measurement(op).reason
    assert measurement(op).chosen is None


def test_measuring_again_keeps_what_else_is_there(file: Path) -> None:
    """Ops that are not measured stay, and so do other machines; what other versions gave goes."""
    edit(file, lambda row: row["ops"].update(gelu=row["ops"]["relu2"]))
    content = json.loads(file.read_text())
    (mine,) = content["machines"]
    other = {**mine, "setup": {**mine["setup"], "device": "another"}}
    file.write_text(json.dumps({**content, "machines": [other, mine]}))
    write(file)
    assert [[*ops] for ops in read_profile(file).values()] == [["gelu", "relu2"], ["gelu", "relu2"]]
    edit(file, lambda row: None)
    content["machines"][0]["setup"]["torch"] = "2.0"
    file.write_text(json.dumps(content))
    write(file)
    assert [(setup.torch == "2.0", [*ops]) for setup, ops in read_profile(file).items()] == [
        (False, ["relu2"])
    ]


def test_writers_at_once_lose_nothing(file: Path) -> None:
    """Rows that several add at the same time are all there, beside files that one has left which was killed."""
    row = read_profile(file).popitem()[1]["relu2"]
    (file.parent / "tuning.json.abcd").write_text("{")

    def add(writer: int) -> None:
        own = ProfileFile(file)
        for number in range(5):
            own.add({f"op_{writer}_{number}": row})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert len(read_profile(file).popitem()[1]) == 21


def test_a_lock_that_is_held_ends_the_waiting(file: Path, monkeypatch) -> None:
    """A process that stands still with the lock is told of, and nothing is written past it."""
    monkeypatch.setattr(measurements, "_LOCKED_FOR", 0.02)
    with open(f"{file}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            InputError, match=r"another process has held .*tuning\.json\.lock for 0\.02 s"
        ):
            ProfileFile(file)
    ProfileFile(file)


def test_another_file_is_not_written_over(file: Path) -> None:
    """A file that holds something else stays as it is; so does a place where none can be made."""
    file.write_text('{"mine": 1}')
    with pytest.raises(InputError, match="remove the file and tune anew"):
        ProfileFile(file)
    assert file.read_text() == '{"mine": 1}'
    with pytest.raises(InputError, match=r"cannot be written: .*: name another"):
        ProfileFile(file / "tuning.json")


def test_every_shape_counts_alike() -> None:
    """The mean is geometric; where another candidate is faster at a shape, its figures say so."""
    shapes = {"1": (1e-6, 3e-6), "512": (4e-3, 1e-3)}
    a, b = (
        TimedChoice(n, Provider(n), n, {s: t[i] for s, t in shapes.items()})
        for i, n in enumerate("ab")
    )
    assert math.isclose(a.mean, math.sqrt(4e-9))
    measured = OpMeasurement("b", 1, "now", (a, b))
    assert measured.verdict == "b 54.8 µs, a 63.2 µs in the mean of 2 shapes"
    assert measured.figures(a) == "63.2 µs in the mean, 1.15 of the time of b, though 0.33 at 1"
    assert measured.figures(b) == "54.8 µs in the mean"


@pytest.mark.parametrize(
    ("calls", "case"), [(0, "relu2 float32"), (7, SHAPES[0])], ids=["at once", "between rounds"]
)
def test_a_kernel_that_raises_is_left_out(tmp_path: Path, calls: int, case: str) -> None:
    """Its reason is kept, and 'auto' takes the others, as what was measured are the candidates that are here."""

    class Broken(ReLUSquaredActivation):
        left = calls

        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            Broken.left -= 1
            if Broken.left < 0:
                raise RuntimeError("the driver is gone")
            return self.forward_native(x)

    ReLUSquaredActivation.register_oot(Broken)
    (race,), _ = tuning.races(["relu2"])
    outcome = tuning.run(race, [torch.float32], SECONDS)
    because = f"at {case} it raised RuntimeError: the driver is gone"
    assert outcome.left_out == {MINE: because}
    assert outcome.measured is not None
    ProfileFile(tmp_path / "tuning.json").add({race.name: outcome.measured})
    with set_config(auto(tmp_path / "tuning.json")):
        op = ReLUSquaredActivation()
    assert op.binding.kernel.winner.key == "native"
    assert re.search(
        "measured: native .* in the mean of 3 shapes; no other ran", op.decision.reason
    )
    native, broken = measurement(op).candidates
    assert (native.accepted, broken.accepted, broken.reason) == (
        True,
        False,
        f"left out, as {because}",
    )


def test_what_would_run_anyway_stays_where_nothing_is_clearly_faster() -> None:
    """The clock's noise does not change a choice: 3 % less is no reason to."""

    class Same(ReLUSquaredActivation):
        def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward_native(x)

    ReLUSquaredActivation.register_oot(Same)
    (race,), _ = tuning.races(["relu2"])
    assert race.usual == MINE
    for native, chosen in ((0.98e-3, MINE), (0.9e-3, "native")):
        assert (
            tuning.best_of(race, {MINE: {"1": 1e-3}, "native": {"1": native}}, {}).chosen == chosen
        )
