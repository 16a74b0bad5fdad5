"""The simulated accelerator: found by a variable, and a device to torch, with all that can be wrong on one.

Each test is a process of its own, as torch keeps a backend to the end of one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import Cli
from opgraft.compat.python_device import why_not
from opgraft.config.environment import SIMULATED_DEVICE
from opgraft.errors import InputError
from opgraft.machine.machine import Machine
from opgraft.testing.devices import SimulatedDevice, probe
from opgraft.testing.simulated_tensors import Running
from support.random_decoders import written
from support.simulated_device import UNFIT

TESTS = Path(__file__).parents[1]

needs_backend = pytest.mark.skipif(
    bool(why_not()), reason="this torch takes a device's guard in C++ only"
)

OPERATORS = """
import copy, io, pickle
import torch, opgraft
platform = opgraft.current_platform()
assert (platform.name, platform.device_type, platform.capability().name) == ("simulated", "simulated", "Acme X1")
generator = torch.Generator().manual_seed(0)
host = torch.randn(3, 4, generator=generator)
x = host.to("simulated")
assert (x.device.type, x.shape, x.t().stride(), x[:, 1:].stride()) == ("simulated", (3, 4), (1, 4), (4, 1))
assert torch.equal((x @ x.t()).relu().cpu(), (host @ host.t()).relu())
x[1].mul_(2)
host[1].mul_(2)
assert torch.equal(x.cpu(), host) and x.tolist() == host.tolist()
assert torch.equal(x[torch.tensor([2, 0])].cpu(), host[[2, 0]])
ours = torch.nn.Linear(4, 5)
theirs = copy.deepcopy(ours).to("simulated")
for model, inputs in ((ours, host), (theirs, x)):
    model(inputs).square().sum().backward()
assert isinstance(theirs.weight, torch.nn.Parameter) and theirs.weight.grad.device.type == "simulated"
torch.testing.assert_close(theirs.weight.grad.cpu(), ours.weight.grad)
again = pickle.loads(pickle.dumps(theirs))
assert again.weight.device.type == "simulated" and torch.equal(again.weight.cpu(), ours.weight)
for weight in (x, theirs.weight):
    kept = torch.randn(weight.shape, generator=generator)
    weight.data = kept.to("simulated")
    assert torch.equal(weight.detach().cpu(), kept)
ours.weight.data = theirs.weight.detach().cpu()
again = copy.deepcopy(theirs).double()
assert again.weight.dtype == torch.float64 and torch.equal(again.weight.cpu(), ours.weight.double())
file = io.BytesIO()
torch.save(theirs.state_dict(), file)
ours.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
"""

CONSTRUCTED = """
import numpy, torch, opgraft
from opgraft.ops.checks import values_are_known
from torch.utils._python_dispatch import TorchDispatchMode
opgraft.current_platform()
class Counted(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))
def expect(made, numbers):
    assert made.device.type == "simulated" and made.tolist() == numbers, made
def construct():
    with torch.device("simulated"):
        expect(torch.tensor([1.0, 2.0]), [1.0, 2.0])
    x = torch.ones(2, device="simulated")
    expect(torch.tensor(1.5, device="simulated"), 1.5)
    expect(torch.tensor([1, 2], dtype=torch.int32, device="simulated"), [1, 2])
    expect(torch.tensor([[True], [False]], device="simulated"), [[True], [False]])
    expect(torch.tensor([], device="simulated"), [])
    expect(torch.as_tensor(numpy.ones(2, numpy.float32), device="simulated"), [1.0, 1.0])
    expect(torch.asarray([1.0], device="simulated"), [1.0])
    expect(x.new_tensor([3.0]), [3.0])
    assert torch.tensor([1.0], device="simulated", requires_grad=True).requires_grad
construct()
x = torch.ones(2, device="simulated")
assert values_are_known(x) and not values_are_known(torch.ones(2, device="meta"))
with Counted():
    construct()
"""

INFERENCE = """
import torch, opgraft
opgraft.current_platform()
def change(x):
    with torch.inference_mode():
        first, *others = x.unbind(0)
        first.add_(1)
        x.view(-1)[2:4].mul_(3)
        x[torch.tensor([0, 1])] = x[torch.tensor([1, 0])]
        x.transpose(0, 1)[1] = 7.0
        made = x * 2
        made[0].zero_()
        made.t_()
    return first, *others, x.view(-1), made, made.detach()
host = torch.arange(12.0).view(3, 4).clone()
x = host.to("simulated")
for here, there in zip(change(host), change(x), strict=True):
    assert torch.equal(here, there.cpu()) and here.is_inference() == there.is_inference()
assert torch.equal(x.cpu(), host) and not x.is_inference()
x.requires_grad_().sum().backward()
assert x.grad.tolist() == torch.ones(3, 4).tolist()
"""

COLLECTIVES = """
import tempfile, torch, opgraft
from opgraft.distributed.communicator import Communicator
from torch import distributed as dist
opgraft.current_platform()
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    ranks = Communicator(dist.group.WORLD, (0,), 0, "tensor")
    host = torch.arange(6.0).view(2, 3)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            x = host.to("simulated")
            for made in (
                ranks.all_reduce(x), ranks.all_gather(x, 0), ranks.all_gather(x, 1), ranks.gather(x, 0, 0),
                ranks.reduce_scatter(x, 0), ranks.all_to_all(x, [2], [2]), ranks.broadcast(x),
            ):
                assert made.device.type == "simulated" and torch.equal(made.cpu(), host), made
    dist.destroy_process_group()
"""

ATTRIBUTES = """
import copy, pickle, torch, opgraft
opgraft.current_platform()
first = torch.nn.Parameter(torch.ones(2, device="simulated"))
first.loader, first.grad = ["a loader"], torch.full((2,), 3.0, device="simulated")
second = torch.nn.Parameter(torch.zeros(2, device="simulated"), requires_grad=False)
vars(second).update(vars(first))
assert second.tolist() == [0.0, 0.0] and second.loader is first.loader
for made in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
    assert isinstance(made, torch.nn.Parameter) and made.requires_grad and made.tolist() == [1.0, 1.0]
    assert made.loader == ["a loader"] and made.loader is not first.loader
    made.detach().add_(1)
assert first.tolist() == [1.0, 1.0] and copy.deepcopy(first).grad.tolist() == [3.0, 3.0]
tied = copy.deepcopy([first, first])
assert tied[0] is tied[1] is not first
try:
    copy.deepcopy(first * 1)
except RuntimeError as error:
    print(error)
"""

ENGINE = """
import json, sys
import opgraft
from opgraft import SamplingParams
drawn = SamplingParams(max_tokens=6, seed=3, top_p=0.9, min_p=0.01, logprobs=1)
given = [SamplingParams(max_tokens=6, temperature=0), drawn]
prompts = [{"prompt_token_ids": ids} for ids in ([1, 2, 3, 4, 5], [7, 8])]
told = []
for ranks in json.loads(sys.argv[2]):
    settings = {"cache.num_blocks": 100, "cache.block_size": 4, "load.progress": False}
    with opgraft.LLM(sys.argv[1], dtype="float32", max_num_seqs=4, **settings, **ranks) as llm:
        told.append([each.outputs[0].token_ids for each in llm.generate(prompts, given)])
print(json.dumps([opgraft.current_platform().name, *told]))
"""

RECORDED = """
import dataclasses, json, sys
import opgraft
from opgraft import SamplingParams
from opgraft.errors import ConfigError
from opgraft.kernels.engine import StaticGraph
from opgraft.ops import Attention
replayed = []
class Counted(StaticGraph):
    def replay(self):
        replayed.append(len(self.inputs[0]))
        return super().replay()
opgraft.PluggableClass.register_oot(Counted, name="static_graph")
prompts = [{"prompt_token_ids": ids} for ids in ([1, 2, 3, 4, 5], [7, 8], [9], [11, 12, 13])]
given = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (3, 6, 12, 9)]
full = {"level": 1, "graph_mode": "full", "capture_sizes": [1, 3]}
settings = {"cache.num_blocks": 100, "cache.block_size": 4, "load.progress": False}
def answers(**further):
    with opgraft.LLM(sys.argv[1], dtype="float32", max_num_seqs=4, **settings, **further) as llm:
        answered = llm.generate(prompts, given)
        return [each.outputs[0].token_ids for each in answered]
def refusal(**further):
    try:
        answers(**further)
    except ConfigError as error:
        return str(error)
plain = answers()
with opgraft.set_config(opgraft.OpgraftConfig(compilation_config=opgraft.CompilationConfig(**full))):
    print(plain == answers())
print(sorted(set(replayed)), len(replayed) > 8)
print(refusal(compilation_config=full, **{"parallel.data": 1, "parallel.pipeline": 2}))
print(refusal(compilation_config=full, **{"parallel.expert_balance_steps": 5}))
settings["cache.memory_bytes"] = 4 * settings.pop("cache.num_blocks") << 12
def blocks(**further):
    with opgraft.LLM(sys.argv[1], dtype="float32", max_num_seqs=4, **settings, **further) as llm:
        return llm.engine.core.cache.pool.num_blocks
print(blocks() - blocks(compilation_config=full))
kind, plans = "values", {}
@Attention.register_oot
class Planning(Attention):
    def attend_batch(self, batch, pages, *given):
        known = {"lengths": batch.seq_lens, "slots": pages.slots, "tables": pages.block_table}
        try:
            batch.seq_lens.max().item()
            plans[self] = {name: x.clone() for name, x in known.items()}
        except RuntimeError:
            if kind == "values":
                raise
            # A plan of the warm run serves the recording.
            known[kind] = plans[self][kind]
        batch = dataclasses.replace(batch, seq_lens=known["lengths"])
        pages = dataclasses.replace(pages, slots=known["slots"], block_table=known["tables"])
        return super().attend_batch(batch, pages, *given)
for kind in ("values", "lengths", "slots", "tables"):
    print(refusal(compilation_config=full))
"""

OF_RANKS = """
import sys
import opgraft
from opgraft.errors import ConfigError
full = {"level": 1, "graph_mode": "full", "capture_sizes": [1, 3]}
settings = {"cache.num_blocks": 100, "cache.block_size": 4, "load.progress": False}
for split in ({"parallel.data": 2, "parallel.expert": 2}, {"parallel.tensor": 2}):
    try:
        opgraft.LLM(sys.argv[1], dtype="float32", max_num_seqs=4, compilation_config=full, **settings, **split)
    except ConfigError as error:
        print(error)
"""

GRAPHS = """
import torch, opgraft
from opgraft.testing.simulated_graphs import Graph, graph
platform = opgraft.current_platform()
assert platform.graph_class is Graph
x, weight, z = (torch.ones(4, device="simulated") for _ in range(3))
recorded = Graph()
called = []
with torch.get_device_module("simulated").graph(recorded, pool=recorded.pool()):
    called.append(1)
    y = (x + weight).view(2, 2).t()
    x.mul_(2)
    first, second = torch.max(x.view(2, 2), 1)
    torch._foreach_add_([z], 1)
assert y.cpu().tolist() == [[2, 2], [2, 2]] and x.tolist() == [2, 2, 2, 2]
weight.fill_(10)
recorded.replay()
assert y.cpu().tolist() == [[12, 12], [12, 12]] and x.tolist() == [4, 4, 4, 4] and first.tolist() == [4, 4]
assert called == [1] and z.tolist() == [3, 3, 3, 3]
for forbidden in (lambda: x.sum().item(), lambda: x.cpu(), lambda: x.copy_(torch.ones(4)), lambda: x.tolist()):
    try:
        with graph(Graph()):
            forbidden()
    except RuntimeError as error:
        print(error)
assert x.sum().item() == 16
"""

MEMORY_OF_GRAPHS = """
import torch, opgraft
from opgraft.testing.simulated_graphs import Graph, graph
opgraft.current_platform()
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
x = torch.ones(1 << 23, device="simulated")
recorded = Graph()
before = resident()
with graph(recorded):
    y = x
    for _ in range(16):
        y = y + 1
    z = y.view(2, -1)
    del y
print(resident() - before < 6 * x.nbytes)
x.fill_(10)
for _ in range(2):
    recorded.replay()
    print(z.amin().item(), z.amax().item())
print(resident() - before < 6 * x.nbytes)
"""

MEMORY = """
import torch, opgraft
platform = opgraft.current_platform()
kept = torch.empty(1 << 18, device="simulated")
view = kept[1:]
assert platform.memory().total - platform.memory().free == 1 << 20
try:
    torch.empty((3 << 18) + 1, device="simulated")
except torch.OutOfMemoryError as error:
    print(error)
torch.empty(3 << 18, device="simulated")
del kept
assert platform.memory().free == 3 << 20
del view
replaced = torch.empty(1 << 18, device="simulated")
replaced.data = torch.empty(1 << 17, device="simulated")
assert platform.memory().free == (4 << 20) - (1 << 19) and replaced.shape == (1 << 17,)
del replaced
assert platform.memory().free == platform.memory().total
"""

FAILING = """
import torch, opgraft
opgraft.current_platform()
x = torch.ones(2, device="simulated")
for number in range(9):
    try:
        x = x + 1
    except RuntimeError as error:
        print(number, error)
"""

REFUSING = """
import torch, opgraft
opgraft.current_platform()
x = torch.ones(2, 2, device="simulated")
for call in (lambda: x + torch.ones(2, 2), lambda: x.half(), lambda: torch.nn.Linear(2, 2)(x)):
    try:
        call()
    except RuntimeError as error:
        print(error)
print((x + torch.tensor(1.0)).cpu().sum().item(), x.to(torch.bfloat16).dtype)
"""

IN_PLACE = """
import torch, opgraft
platform = opgraft.current_platform()
x, y = torch.arange(6.0, device="simulated").view(2, 3).clone(), torch.empty(0, device="simulated")
host, free = torch.arange(6.0).view(2, 3), platform.memory().free
for change in (
    lambda x: x.t_(),
    lambda x: x.unsqueeze_(0),
    lambda x: x.resize_(4),
    lambda x: torch.add(torch.ones(3, device=x.device), 1, out=x),
    lambda x: x.set_(torch.full((2, 5), 7.0, device=x.device)),
):
    change(x), change(host)
    assert (x.shape, x.stride()) == (host.shape, host.stride()) and torch.equal(x.cpu(), host), (x, host)
    assert torch.equal((x + 1).cpu(), host + 1)
assert platform.memory().free == free - 16
y.resize_(1 << 18)
assert (y.shape, platform.memory().free) == ((1 << 18,), free - 16 - (1 << 20))
for call in (lambda: y.resize_(1 << 22), lambda: setattr(x, "data", torch.zeros(2, 3))):
    try:
        call()
    except RuntimeError as error:
        print(error)
    assert (y.shape, y.untyped_storage().nbytes()) == ((1 << 18,), 1 << 20)
    assert (x.shape, platform.memory().free) == ((2, 5), free - 16 - (1 << 20))
"""

QUEUED = """
import torch, opgraft
platform = opgraft.current_platform()
streams = platform.streams
x, host = torch.zeros(2, 3, device="simulated"), torch.ones(2, 3)
two = torch.full((2, 3), 2.0, device="simulated")
side = streams.Stream()
with streams.stream(side):
    x.add_(1)
    x.mul_(two)
assert not side.query() and x.tolist() == [[0.0] * 3] * 2
with streams.stream(side):
    event = side.record_event()
    x.copy_(host)
    x.t_()
    assert side.query() and event.query() and (x.shape, x.sum().item()) == ((3, 2), 6)
    x.add_(1)
    del side
platform.synchronize()
assert x.sum().item() == 12
with streams.stream(streams.Stream()):
    for _ in range(99):
        x.add_(1)
try:
    platform.synchronize()
except RuntimeError as error:
    print(error)
"""

GRAFTED = """
import copy, torch, opgraft
model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.GELU(), torch.nn.LayerNorm(6))
inputs = torch.randn(5, 8)
expected = model(inputs)
model.to(opgraft.current_platform().device_type)
opgraft.graft(model)
torch.testing.assert_close(model(inputs.to("simulated")).cpu(), expected)
print(model[1].decision.chosen)
"""

PLUGIN = """
from opgraft.ops import GELU
import torch
platforms = ("simulated",)
@GELU.register_oot
class Acme(GELU):
    def forward_oot(self, input):
        return torch.nn.functional.gelu(input, approximate=self.approximate)
"""


KERNELS = """
from opgraft.ops import RMSNorm, SiluAndMul
platforms = "any"
@RMSNorm.register_oot
class AcmeNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return self.forward_native(x, residual)
@SiluAndMul.register_oot
class AcmeGate(SiluAndMul):
    def forward_oot(self, x):
        return self.forward_native(x)
"""


def on(device: str, python: str, code: str, *arguments: str, site: Path | None = None) -> list[str]:
    """Run code in a process with that device; returns the lines that it prints."""
    environ = {**os.environ, SIMULATED_DEVICE: device, "PYTHONPATH": str(site or "")}
    command = [python, "-c", code, *arguments]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@needs_backend
def test_operators_compute_what_the_host_computes(warm_python: str) -> None:
    """Views, writing in place, gradients, modules, pickles and checkpoints are those of the host, on the device."""
    on("name=Acme X1,dtypes=float64 float32", warm_python, OPERATORS)


@needs_backend
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (CONSTRUCTED, []),
        (INFERENCE, []),
        (
            ATTRIBUTES,
            [
                "a tensor of simulated:0 that was computed with gradients has no deep copy: "
                "detach it first"
            ],
        ),
        (COLLECTIVES, []),
    ],
    ids=["constructed", "inference", "attributes", "collectives"],
)
def test_tensors_are_those_of_the_host(code: str, printed: list[str], warm_python: str) -> None:
    """Constructors, ``inference_mode``, attributes of parameters and collectives do what they do on the host."""
    assert on("default", warm_python, code) == printed


@needs_backend
def test_the_engine_runs_on_it(warm_python: str, tmp_path: Path) -> None:
    """Likeliest and drawn tokens are those of the CPU, without float64 there; compiled and by two workers too."""
    written("Llama", tmp_path, vocab_size=400)
    compiled = {"compilation_config.level": 2}
    ranks = {"parallel.tensor": 2}
    runs = json.dumps([{}, ranks, compiled, {**ranks, **compiled}])
    (on_device,) = on("default", warm_python, ENGINE, str(tmp_path), runs)
    (on_host,) = on("", warm_python, ENGINE, str(tmp_path), "[{}]")
    platform, alone, *others = json.loads(on_device)
    assert platform == "simulated"
    assert json.loads(on_host) == ["cpu", alone]
    assert others == [alone] * 3


@needs_backend
def test_graphs_are_recorded_and_replayed(warm_python: str) -> None:
    """A replay computes from the current numbers, on the same memory, without Python; the host gets no value."""
    lines = on("default", warm_python, GRAPHS)
    assert len(lines) == 4
    assert "_local_scalar_dense gives the host a value, which no recording has" in lines[0]
    for line in lines[1:]:
        assert "moves numbers between the host and the device, which no recording has" in line


@needs_backend
def test_a_graph_shares_the_memory_of_what_is_freed(warm_python: str) -> None:
    """Sixteen sums in a row take the memory of a few, in the recording and in each replay."""
    lines = on("default", warm_python, MEMORY_OF_GRAPHS)
    assert lines == ["True", "26.0 26.0", "26.0 26.0", "True"]


@needs_backend
def test_whole_steps_are_recorded(warm_python: str, tmp_path: Path) -> None:
    """Steps with a token of each sequence are replayed, padded, and answer as before; what cannot be is refused."""
    written("Llama", tmp_path, vocab_size=400)
    lines = on("default", warm_python, RECORDED, str(tmp_path))
    alike, sizes, pipeline, balance, padding, asking, *stale = lines
    assert (alike, sizes) == ("True", "[1, 3] True")
    assert "a step waits for other ranks, as parallel.pipeline is 2" in pipeline
    assert "parallel.expert_balance_steps is 5" in balance
    assert padding == "1"  # for three rows of padding, in blocks of four tokens
    assert "a step of 3 sequences cannot be recorded" in asking
    assert "gives the host a value, which no recording has" in asking
    assert asking.endswith("Next: set compilation_config.graph_mode to piecewise or none")
    assert len(stale) == 3
    for line in stale:
        assert "a recorded step of 3 sequences computes something else than the model" in line


@needs_backend
def test_steps_of_ranks_are_not_recorded(warm_python: str, tmp_path: Path) -> None:
    """The engine refuses replicas that share experts, and ranks whose sums run on the host."""
    written("Llama", tmp_path, vocab_size=400)
    replicas, tensor = on("default", warm_python, OF_RANKS, str(tmp_path))
    assert "a step waits for other ranks" in replicas
    assert "parallel.data 2" in replicas
    assert "c10d::allreduce_ gives the host a value, which no recording has" in tensor


@needs_backend
def test_kernels_are_judged_on_it(site, cli) -> None:
    """Kernels that call the native definitions pass every check there, as they do on the CPU."""
    site.plugin("acme", KERNELS)
    told = cli("plugins", "check", "acme", **{SIMULATED_DEVICE: "default"})
    assert told.returncode == 0, told.stdout
    assert re.search(r"acme .* on simulated .*: \d\d passed, 0 failed, \d skipped", told.stdout)


@needs_backend
def test_memory_is_limited_and_given_back(warm_python: str) -> None:
    """What does not fit is torch's own error; views take no memory, and hold it."""
    (line,) = on("name=Acme X1,memory=4MiB", warm_python, MEMORY)
    assert (
        line == "Acme X1 out of memory: 3145732 bytes were asked for, 1048576 of 4194304 are in use"
    )


@needs_backend
def test_it_fails_after_so_many_kernels(warm_python: str) -> None:
    """Every further kernel raises, as on a device that is lost."""
    lines = on("fails_after=5", warm_python, FAILING)
    assert [int(line.split()[0]) for line in lines] == list(range(9 - len(lines), 9))
    assert 4 <= len(lines) < 9
    assert (
        "Simulated accelerator failed: it has run 5 kernels, and aten::add would be another"
        in lines[-1]
    )


@needs_backend
def test_what_a_device_refuses(warm_python: str) -> None:
    """Tensors of the host beside those of the device, but for single numbers, and dtypes that it does not have."""
    mixed, half, weights, fine = on("dtypes=float32 bfloat16", warm_python, REFUSING)
    assert mixed.startswith(
        "Expected all tensors to be on the same device, but aten::add was given one on cpu"
    )
    assert half == "Simulated accelerator computes no float16, which aten::_to_copy was to give"
    assert weights.startswith("Expected all tensors to be on the same device")
    assert fine == "8.0 torch.bfloat16"


@needs_backend
def test_tensors_change_in_place(warm_python: str) -> None:
    """Shape, strides and memory are those of the host afterwards; what does not fit leaves the tensor as it was."""
    memory, data = on("memory=4MiB", warm_python, IN_PLACE)
    assert memory.startswith("Simulated accelerator out of memory: 16777216 bytes were asked for")
    assert data == "a tensor of cpu cannot be the data of one of simulated:0: move it there"


@needs_backend
def test_what_is_queued_waits(warm_python: str) -> None:
    """Writes in place run late, in order, and fail late; what the host takes part in, and views, come after them."""
    (line,) = on("fails_after=60", warm_python, QUEUED)
    assert (
        line
        == "Simulated accelerator failed: it has run 60 kernels, and aten::add_ would be another"
    )


@needs_backend
def test_a_plugin_serves_it(warm_python: str, site) -> None:
    """A model is moved there and grafted, and takes the kernel that a plugin has for that platform."""
    site.plugin("acme", PLUGIN)
    assert on("default", warm_python, GRAFTED, site=site.folder) == ["Acme.forward_oot"]


@pytest.mark.parametrize("name", ["_ExcludeDispatchKeyGuard", "_parse_dispatch_key"])
def test_a_torch_without_a_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch lacks a name that the device needs, the reason names it, and no device is made."""
    monkeypatch.delattr(torch._C, name)
    assert f"has no {name}, by which a device in Python runs operators" in why_not()


def test_tests_that_are_left_out_exist() -> None:
    """Each row of the tests that the device does not run is a file, or a function in one."""
    for row in UNFIT:
        file, _, function = row.partition("::")
        source = (TESTS / file).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in source, row


def test_without_the_variable_there_is_none(cli) -> None:
    """The platform is offered where the variable names a device, and only there."""
    assert "simulated" not in cli("detect", "--all").stdout
    told = cli(
        "detect", "--all", **{SIMULATED_DEVICE: "name=Acme X1,memory=64MiB,features=x1 x2"}
    ).stdout
    assert "platform: simulated" in told
    assert "1 x Acme X1, x1 x2, 64 MiB" in told


def test_what_the_variable_says() -> None:
    """Each part is read; what is left out is as usual."""
    text = (
        "name=Acme X1, memory=1.5KiB,dtypes=float16 float32,fails_after=0,seconds=2ms,features=a b"
    )
    expected = SimulatedDevice("Acme X1", ("a", "b"), 1536, ("float16", "float32"), 0, 0.002)
    assert SimulatedDevice.parse(text) == expected
    assert SimulatedDevice.parse("default") == SimulatedDevice()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "memry=1GiB",
            "'memry' is no part of a simulated device, or stands twice: did you mean 'memory'",
        ),
        ("memory=1GiB,memory=2GiB", "'memory' is no part of a simulated device, or stands twice"),
        ("memory=much", "memory of OPGRAFT_SIMULATED_DEVICE is 'much', expected bytes"),
        ("dtypes=int8", "give some of float64 float32 bfloat16 float16"),
        ("dtypes=", "give some of float64 float32 bfloat16 float16"),
        (
            "fails_after=-1",
            "fails_after of OPGRAFT_SIMULATED_DEVICE is '-1': give a number of kernels",
        ),
        ("seconds=0", "seconds of OPGRAFT_SIMULATED_DEVICE is '0', expected seconds above zero"),
    ],
)
def test_a_variable_that_describes_nothing(text: str, reason: str) -> None:
    """It is an error that names the part. The probe, which never raises, tells the same, and no other device serves."""
    with pytest.raises(InputError) as caught:
        SimulatedDevice.parse(text)
    evidence = probe(Machine(environ={SIMULATED_DEVICE: text}))
    assert reason in str(caught.value)
    assert (evidence.available, evidence.reason) == (True, str(caught.value))


def test_a_variable_that_describes_nothing_ends_a_run(cli: Cli) -> None:
    """The CPU does not answer in the place of a device that is spelt wrong."""
    done = cli("run", "minilm", "hi", **{SIMULATED_DEVICE: "memry=1GiB"})
    assert done.returncode == 3
    assert "did you mean 'memory'" in done.stderr
    assert not done.stdout


def test_kernels_may_be_slow() -> None:
    """A device that takes time takes it for each kernel."""
    waited: list[float] = []
    device = Running(wait=waited.append)
    device.about = SimulatedDevice(seconds=0.25)
    device.run("aten::add")
    device.run("aten::mul")
    assert waited == [0.25, 0.25]
    assert device.kernels == 2
