"""Programs of other libraries under ``opgraft exec``, with the CPU kernels. Run by ``make test-hosts``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_kernels.conftest import installed as installed
from support.small_words import word_llama

# Not imported here: timm imports torchvision.
pytestmark = pytest.mark.skipif(
    find_spec("timm") is None, reason="'make test-hosts' installs programs that use models"
)

TORCHVISION = """
import torch

# Its wheels for CUDA cannot load their ops beside the torch for CPUs, and declare rules of these two all the same.
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
"""

OPS: dict[str, Any] = {}
"""Keeps the definitions for this process, which makes models, too."""
if find_spec("torchvision") is not None and torch.version.cuda is None:
    exec(TORCHVISION, OPS)  # noqa: S102  # the text above

DIFFUSES = """
import json, sys
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, DiTPipeline, DiTTransformer2DModel

def made(folder):
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=4,
        num_embeds_ada_norm=1000, norm_num_groups=2)
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=2, latent_channels=4, sample_size=8)
    DiTPipeline(transformer=transformer, vae=vae, scheduler=DDIMScheduler()).save_pretrained(folder)

folder, = sys.argv[1:]
made(folder)
pipeline = DiffusionPipeline.from_pretrained(folder)
pipeline.set_progress_bar_config(disable=True)
images = pipeline([1, 3], generator=torch.manual_seed(1), num_inference_steps=3, output_type="np").images
print(json.dumps(images[:, ::2, ::2].tolist()))
"""

VALIDATES = """
import json, sys
from pathlib import Path
import numpy
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_dataset, create_loader, resolve_data_config

folder, name = sys.argv[1:]
colours = numpy.random.default_rng(0)
for number in range(6):
    place = Path(folder, "images", f"class{number % 2}")
    place.mkdir(parents=True, exist_ok=True)
    Image.fromarray(colours.integers(0, 255, (40, 40, 3), dtype="uint8")).save(place / f"{number}.png")
torch.manual_seed(0)
sizes = {"num_classes": 3, "pretrained": False}
weights = f"{folder}/weights.safetensors"
save_file(timm.create_model(name, **sizes).state_dict(), weights)

model = timm.create_model(name, checkpoint_path=weights, **sizes).eval()
data = resolve_data_config({"input_size": (3, 32, 32)}, model=model)
images = create_dataset("", root=f"{folder}/images", split="")
loader = create_loader(images, batch_size=3, use_prefetcher=False, num_workers=0, input_size=data["input_size"],
                       device=torch.device("cpu"))
with torch.inference_mode():
    print(json.dumps([model(batch).tolist() for batch, _ in loader]))
"""

ADAPTS = """
import json, sys
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

base, folder = sys.argv[1:]
ids = torch.arange(3, 9)[None]
settings = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, r=4)

def logits(model):
    with torch.no_grad():
        return model(ids).logits.tolist()

torch.manual_seed(0)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
losses = []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.save_pretrained(folder)
told = [losses, logits(model.eval())]
loaded = AutoPeftModelForCausalLM.from_pretrained(folder)
told.append(logits(loaded))
with loaded.disable_adapter():
    told.append(logits(loaded))
told.append(logits(loaded.merge_and_unload()))
again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
told.append(logits(again))
told.append(again.generate(input_ids=ids, max_new_tokens=8, do_sample=False).tolist())
print(json.dumps(told))
"""

KERNELIZES = """
import json, sys
import torch
import opgraft
from kernels import Mode, kernelize, register_kernel_mapping, replace_kernel_forward_from_hub
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.arange(3, 9)[None]
with torch.no_grad():
    before = model(ids).logits
    mapping = opgraft.kernel_mapping()
    register_kernel_mapping(mapping)
    kernelize(model, mode=Mode.INFERENCE, device="cpu")
    with opgraft.profile(), torch.profiler.profile() as profiler:
        after = model(ids).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(ids).logits
ran = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("opgraft.")}
print(json.dumps({"layers": {name: str(rows["cpu"]) for name, rows in mapping.items()}, "ran": ran,
                  "differences": [(x - before).abs().max().item() for x in (after, compiled)]}))
"""

TASK = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


@dataclass(frozen=True)
class Ran:
    """A program by itself and under ``opgraft exec``: the folders it worked in, what it printed, and the report."""

    plain: Path
    grafted: Path
    expected: str
    told: str
    models: list[Any]

    def ops(self) -> set[str]:
        """The ops that run a kernel of the plugin."""
        rows = [row for model in self.models for row in model["counts"]]
        return {row["op"] for row in rows if row["provider"]["name"] == "opgraft-cpu-kernels"}


Run = Callable[..., Ran]


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Run a program with arguments, in a folder each. ``{folder}`` in an argument is that folder."""
    (tmp_path / "site").mkdir()
    if torch.version.cuda is None:
        (tmp_path / "site/sitecustomize.py").write_text(TORCHVISION)

    def in_folder(name: str, command: list[str], arguments: tuple[str, ...], **more: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        variables = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(installed)]),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "huggingface"),
            **more,
        }
        given = [argument.format(folder=folder) for argument in arguments]
        ran = subprocess.run(
            [*command, *given],
            env={**os.environ, **variables},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def both(program: list[str], *arguments: str) -> Ran:
        report = tmp_path / "report.json"
        expected = in_folder("plain", [sys.executable, *program], arguments)
        command = [sys.executable, "-m", "opgraft", "exec", *program]
        told = in_folder("grafted", command, arguments, OPGRAFT_REPORT=str(report))
        models = json.loads(report.read_text())["models"]
        return Ran(tmp_path / "plain", tmp_path / "grafted", expected, told, models)

    return both


def printed(text: str) -> torch.Tensor:
    """What a program printed as JSON in the last line."""
    return torch.tensor(json.loads(text.splitlines()[-1]))


def test_a_diffusers_pipeline(run: Run, tmp_path: Path) -> None:
    """The transformer and the autoencoder of a pipeline are grafted, and the images are the same."""
    (tmp_path / "diffuses.py").write_text(DIFFUSES)
    ran = run([str(tmp_path / "diffuses.py")], "{folder}/pipeline")
    torch.testing.assert_close(printed(ran.told), printed(ran.expected), atol=1e-4, rtol=1e-4)
    assert {model["class"] for model in ran.models} == {"DiTTransformer2DModel", "AutoencoderKL"}
    assert ran.ops() >= {"linear"}, ran.models


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_a_validation_by_timm(run: Run, tmp_path: Path, name: str) -> None:
    """A model with a checkpoint, and images of a folder through timm's loader: the logits are the same."""
    (tmp_path / "validates.py").write_text(VALIDATES)
    ran = run([str(tmp_path / "validates.py")], "{folder}", name)
    torch.testing.assert_close(printed(ran.told), printed(ran.expected), atol=1e-4, rtol=1e-4)
    assert [model["builder"] for model in ran.models] == ["timm.models._factory.create_model"] * 2
    assert ran.ops() >= {"linear"}, ran.models


def test_adapters_of_peft(run: Run, tmp_path: Path) -> None:
    """Adapters train, load, switch off, merge and generate on grafted models as on others."""
    (tmp_path / "adapts.py").write_text(ADAPTS)
    base = word_llama(tmp_path / "base")
    ran = run([str(tmp_path / "adapts.py")], str(base), "{folder}/adapter")
    told, expected = (json.loads(text.splitlines()[-1]) for text in (ran.told, ran.expected))
    for ours, theirs in zip(told, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=1e-4)
    assert len(ran.models) == 3
    assert ran.ops() >= {"linear", "rms_norm"}, ran.models


def test_the_evaluation_harness(run: Run, tmp_path: Path) -> None:
    """lm-eval, as its command, gives each answer of a task the same log-probability."""
    rows = tmp_path / "rows.jsonl"
    questions = [
        {"question": "the capital of France is", "choices": ["Paris", "a cat"], "answer": 0},
        {"question": "two and two", "choices": ["the sky", "is four", "blue"], "answer": 1},
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in questions))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/capitals.yaml").write_text(TASK.format(rows=rows))
    model = word_llama(tmp_path / "model")
    arguments = ["--model", "hf", "--model_args", f"pretrained={model},dtype=float32"]
    arguments += ["--tasks", "capitals", "--include_path", str(tmp_path / "tasks")]
    arguments += ["--batch_size", "2", "--device", "cpu", "--output_path", "out", "--log_samples"]
    ran = run(["-m", "lm_eval"], *arguments)
    found = []
    for folder in (ran.grafted, ran.plain):
        (samples,) = folder.glob("out/**/samples_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        found.append([float(answer[0]) for line in lines for answer in line["filtered_resps"]])
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert len(found[0]) == 5
    assert [model["class"] for model in ran.models] == ["LlamaForCausalLM"]
    assert ran.ops() >= {"linear", "rms_norm"}, ran.models


def test_the_package_kernels(run: Run, tmp_path: Path) -> None:
    """``kernels`` puts a plugin's norm into a model of transformers, eager and compiled as one graph."""
    program = tmp_path / "kernelizes.py"
    program.write_text(KERNELIZES)
    base = word_llama(tmp_path / "base")
    told = json.loads(run([str(program)], str(base)).expected.splitlines()[-1])
    assert "opgraft-cpu-kernels" in told["layers"]["RMSNorm"]
    (row,) = [name for name in told["ran"] if name.startswith("opgraft.rms_norm")]
    assert "opgraft-cpu-kernels" in row
    assert told["ran"][row] == 5
    assert max(told["differences"]) < 1e-5
