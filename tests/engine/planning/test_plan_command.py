"""``opgraft plan``: its answers, and what it says where nothing fits or something is misspelt."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli.test_schemas import validator
from click.testing import CliRunner, Result
from conftest import Site
from opgraft.cli.plan import command
from opgraft.cli.run import command as run_command
from opgraft.cli.serve import command as serve_command
from opgraft.engine.planning.devices import device_of
from opgraft.errors import ConfigError, InputError, OpgraftError
from opgraft.machine.device_figures import DeviceFigures

LARGE = Path(__file__).parent / "llama-405b"
"""The configuration of a published model of 405 billion parameters, without weights."""


def plan(*arguments: str, model: Path | str = LARGE) -> Result:
    return CliRunner().invoke(command, [str(model), *arguments])


def answer(*arguments: str, model: Path | str = LARGE) -> dict[str, Any]:
    """The JSON of a plan, which fits its schema."""
    found: dict[str, Any] = json.loads(plan(*arguments, "--json", model=model).stdout)
    assert [error.message for error in validator("opgraft.plan/1").iter_errors(found)] == []
    return found


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """The configuration of a small model with experts."""
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 192,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_large_model_on_16_devices() -> None:
    """What 405 billion parameters take on 16 devices of 80 GiB, against the same by hand."""
    found = answer(
        "--devices", "16", "--device", "h100", "--pipeline", "1", "--data", "1", "--batch", "16"
    )
    (row,) = found["splits"]
    assert row["tensor"] == 16
    layer = 16384 * (128 // 16 * 128 * 2 + 2 * 128) + 3 * 16384 * 53248 // 16 + 2 * 16384
    rope = 131072 * 128  # rows of a table, beside the weights
    assert row["weight_bytes"] == 2 * (126 * layer + 2 * 128256 // 16 * 16384 + 16384 + rope)
    cache = (80 * 2**30 - row["weight_bytes"]) * 0.9
    assert (
        row["cache_tokens"] == cache // (126 * 2 * 128 * 2 * 32) * 32
    )  # one of eight key heads, in blocks of 32
    summed = 2 * 15 / 16 * 16384 * 2
    assert row["sent_bytes_per_token"]["tensor"] == pytest.approx(
        253 * summed + 15 * 128256 // 16 * 2
    )
    read = row["weight_bytes"] - 2 * (128256 // 16 * 16384 + rope)
    assert row["stages"][0]["weights"] == pytest.approx(read / 3.35e12, rel=1e-3)
    assert row["tokens_per_second"] == pytest.approx(16 / row["step_seconds"])


def test_bandwidth_sets_the_time_of_a_step(experts: Path) -> None:
    """A device of half the bandwidth reads weights and cache in twice the time; what it sends is the same."""
    common = ("--devices", "2", "--memory", "80GiB", "--tensor", "2", "--link", "450GB/s")
    fast = answer(*common, "--bandwidth", "3.35TB/s", model=experts)["splits"][0]
    slow = answer(*common, "--bandwidth", "1.675TB/s", model=experts)["splits"][0]
    for part, times in (("weights", 2), ("cache", 2), ("collectives", 1)):
        assert slow["stages"][0][part] == pytest.approx(times * fast["stages"][0][part])
    assert slow["sent_bytes_per_step"] == fast["sent_bytes_per_step"]


def test_what_is_published_of_a_large_model() -> None:
    """In bfloat16 it runs on 16 devices as two stages of eight tensor ranks, and on eight devices by no split."""
    common = ("--device", "h100", "--data", "1")
    (row,) = answer("--devices", "16", *common, "--tensor", "8", "--pipeline", "2")["splits"]
    assert len(row["stages"]) == 2
    assert row["weight_bytes"] < 80 * 2**30
    found = plan("--devices", "8", "--device", "h100", "--json")
    assert found.exit_code == 1
    none = json.loads(found.stdout)
    assert none["splits"] == []
    assert {(row["tensor"], row["pipeline"]) for row in none["refused"]} >= {
        (1, 8),
        (2, 4),
        (4, 2),
        (8, 1),
    }


def test_what_does_not_fit_has_a_reason_and_the_least_number() -> None:
    """On eight devices the weights alone are too large: the plan says so, and how many devices would do."""
    found = plan("--devices", "8", "--device", "h100", "--tensor", "8")
    assert found.exit_code == 1
    assert "the weights take 756 GiB, and 8 devices have 640 GiB" in found.stdout
    assert "the least number on which one fits is 11: give --devices 11, or" in found.stderr


def test_a_cache_too_small_for_the_batch() -> None:
    """Weights fit and the sequences do not: the reason has both numbers."""
    found = plan(
        "--devices",
        "16",
        "--device",
        "h100",
        "--tensor",
        "16",
        "--batch",
        "64",
        "--context",
        "32768",
    )
    assert found.exit_code == 1
    assert "sequences of 32768 tokens, and not for 64" in found.stdout


def test_sizes_that_do_not_divide(experts: Path) -> None:
    """Three ranks share neither eight heads nor eight experts evenly: each split says which."""
    found = answer(
        "--devices",
        "3",
        "--memory",
        "1GiB",
        "--bandwidth",
        "1TB/s",
        "--context",
        "64",
        model=experts,
    )
    reasons = {
        (row["tensor"], row["expert"]): row["reason"]
        for row in found["refused"]
        if row["pipeline"] == 1
    }
    assert "cannot share 2 key heads" in reasons[3, 1]
    assert "cannot be shared by 3 ranks evenly" in reasons[1, 3]
    assert [row["data"] for row in found["splits"]] == [3]


def test_experts_over_replicas_are_exchanged(experts: Path) -> None:
    """Experts of all ranks of two replicas take less memory, and their tokens are sent."""
    arguments = (
        "--devices",
        "4",
        "--memory",
        "1GiB",
        "--bandwidth",
        "1TB/s",
        "--context",
        "64",
        "--data",
        "2",
    )
    rows = {
        row["expert"]: row for row in answer(*arguments, "--tensor", "2", model=experts)["splits"]
    }
    assert rows[4]["weight_bytes"] < rows[1]["weight_bytes"]
    assert set(rows[1]["sent_bytes_per_step"]) == {"tensor"}
    assert rows[4]["sent_bytes_per_step"]["data"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h10"), "no device is known as 'h10' (did you mean h100"),
        (
            ("--bandwidth", "1TB/s"),
            "--memory of a device is not given: name one by --device, which knows a100",
        ),
        (
            ("--device", "h100", "--memory", "80"),
            "--memory is '80', expected bytes above zero with their unit",
        ),
        (
            ("--device", "h100", "--link", "4GiB"),
            "--link is '4GiB', expected bytes per second above zero",
        ),
        (
            ("--device", "h100", "--flops", "0TFLOPS"),
            "--flops is '0TFLOPS', expected operations per second",
        ),
        (
            ("--device", "h100", "--tensor", "5"),
            "16 devices cannot be split with tensor 5: fix sizes whose product",
        ),
    ],
)
def test_mistakes_say_what_to_give(experts: Path, arguments: tuple[str, ...], message: str) -> None:
    """Each wrong option is named with what it takes."""
    error = plan("--devices", "16", *arguments, model=experts).exception
    assert isinstance(error, InputError)
    assert message in str(error)


def test_a_model_that_is_none() -> None:
    """A name that is no checkpoint is refused as by other commands."""
    error = plan("--devices", "2", "--device", "v5e", model="smollm3").exception
    assert isinstance(error, OpgraftError)
    assert "'smollm3' is no folder and no file" in str(error)


def test_known_devices_have_sources() -> None:
    """Each device of the reference is known, by its last part too, and says where its figures are from."""
    for name in ("a100", "h100", "h200", "mi300x", "tpu-v4", "v5e", "v5p", "tpu-v6e"):
        device = device_of(name, {})
        assert device.name.endswith(name)
        assert device.source
        assert device.flops["bfloat16"] > 1e14


DEVICES = """
from opgraft import Evidence, PlatformSpec
from opgraft.machine.device_figures import DeviceFigures
def probe(machine):
    return Evidence(False, "no device")
DEVICES = [DeviceFigures("brix-2", memory=1e12, bandwidth=1e13, source="its maker")]
SPEC = PlatformSpec(probe, "brix_device:Device", devices="brix_device:DEVICES")
BROKEN = PlatformSpec(probe, "brix_device:Device", devices="brix_device:NOTHING")
"""


def test_a_plugin_makes_its_device_known(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A platform of a plugin names figures of its devices, and one that cannot be asked harms nobody."""
    points = {"opgraft.platforms": ["brix = brix_device:SPEC", "brax = brix_device:BROKEN"]}
    site.install("brix-dist", {"brix_device.py": DEVICES}, points)
    assert device_of("2", {"flops": 1e15}) == DeviceFigures(
        "brix-2", 1e12, 1e13, {"": 1e15}, source="its maker"
    )
    assert "the devices of platform brax are not known" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor": 5},
            r"shared by tensor 5: embedding .* 192, which 5 tensor-parallel ranks do not divide",
        ),
        (
            {"tensor": 2, "pipeline": 3},
            r"shared by tensor 2, pipeline 3: the pipeline has 3 stages.* 2 layers",
        ),
        (
            {"pipeline": 2, "stage_layers": "1,2", "executor": "ray"},
            r"shared by pipeline 2: .*stage_layers",
        ),
        ({"expert": 6, "tensor": 2, "data": 3}, r"shared by tensor 2, data 3, expert 6: .*experts"),
    ],
)
@pytest.mark.parametrize("start", [[run_command, "Why?"], [serve_command]], ids=["run", "serve"])
def test_what_cannot_be_is_refused_before_workers_start(
    experts: Path, start: list[Any], settings: dict[str, object], message: str
) -> None:
    """There are no weights here, of which a worker would tell."""
    options = [
        text for name, value in settings.items() for text in (f"--parallel.{name}", str(value))
    ]
    result = CliRunner().invoke(start[0], [str(experts), *start[1:], *options])
    assert isinstance(result.exception, ConfigError)
    assert re.search(message, str(result.exception))
    assert f"'opgraft plan {experts} --devices" in str(result.exception)
