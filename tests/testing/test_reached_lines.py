"""Lines of a kernel that no input reaches: in answers, in the evidence and in the text for people."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cli.test_conformance import errors_of
from opgraft.base.reached import ReachedLines, united
from opgraft.cli import evidence
from opgraft.errors import InputError
from opgraft.testing import drawn_checks, reached_lines
from opgraft.testing.conformance import CheckOutcome, Conformance, alone

POINTS = {"opgraft.plugins": ["acme = acme"]}
KERNELS = """\
import torch
from acme.parts import exact, in_thread
from opgraft.ops import GELU


@GELU.register_oot
class AcmeGELU(GELU):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.approximate == "no such":
            raise ValueError

    def forward_oot(self, input):
        if input.dtype == torch.bfloat16:
            input = input + 0

        if input.dim() > 9:
            # A comment is no line of code.
            input = input + 1
            return exact(input, self.approximate)
        return exact(input, self.approximate)
"""
PARTS = """\
import torch


def exact(input, approximate):
    out = torch.nn.functional.gelu(input, approximate=approximate)
    if input.dim() > 9:
        out = never(out)
    return out


def never(out):
    return out


def in_thread(input):
    return input
"""
FAR = ["acme/kernels.py:19-20", "acme/parts.py:7"]
"""The lines for inputs of ten dimensions."""

WHOLE = """
import torch
from opgraft.ops import GELU
platforms = "any"
{before}
@GELU.register_oot
class Acme(GELU):
    def forward_oot(self, input):
{body}
"""


def module(body: str, before: str = "") -> str:
    """A plugin of one module, with a kernel of these lines."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    return WHOLE.format(before=before, body=lines)


@pytest.fixture
def answers(site, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[CheckOutcome]]:
    """Judge ``acme`` by the values and the inputs of GELU."""
    # Beside other work, the kit would draw fewer inputs.
    monkeypatch.setattr(drawn_checks, "PATIENCE_IN_BRIEF", 60.0)

    def judge(source: str = "", **files: str) -> list[CheckOutcome]:
        site.install("acme", files or {"acme.py": source}, POINTS)
        with alone("acme"):
            conformance = Conformance("acme", brief=True)
            wanted = [
                case
                for case in conformance.cases
                if case.op in ("gelu", "relu") and case.check in ("values", "inputs")
            ]
            found = [conformance.judge(case) for case in wanted]
        assert {each.status for each in found} == {"passed"}, found
        return found

    return judge


def lines_of(found: list[CheckOutcome]) -> ReachedLines | None:
    return united(each.lines for each in found if each.lines)


def package() -> dict[str, str]:
    init = "import acme.kernels\nplatforms = 'any'\n"
    return {"acme/__init__.py": init, "acme/kernels.py": KERNELS, "acme/parts.py": PARTS}


def test_a_branch_that_no_input_reaches_is_told(answers) -> None:
    """Each answer has its own lines; a line that one dtype reaches is none that never ran."""
    found = answers(**package())
    lines = lines_of(found)
    of_kernels = ("acme/kernels.py:14-15", "acme/kernels.py:17", "acme/kernels.py:21")
    of_parts = ("acme/parts.py:5-6", "acme/parts.py:8")
    assert lines == ReachedLines((*of_kernels, *of_parts), tuple(FAR))
    of_float32 = [each.lines for each in found if each.dtype == "float32"]
    assert [each and "acme/kernels.py:15" in each.never_run for each in of_float32] == [True, True]
    others = [each.lines for each in found if each.dtype == "bfloat16"]
    assert [each and each.never_run for each in others] == [tuple(FAR)] * 2


def test_a_person_is_told(site, cli) -> None:
    """The text names file and lines once for an op."""
    site.install("acme", package(), POINTS)
    result = cli("plugins", "check", "acme")
    assert result.returncode == 0, result.stdout
    told = [line for line in result.stdout.splitlines() if line.startswith("never run")]
    assert told == [f"never run: gelu: {', '.join(FAR)}"]
    assert "not known" not in result.stdout


def test_the_evidence_has_the_lines(answers, tmp_path) -> None:
    """The lines of each answer, and together; they are there again when the file is read."""
    about = {
        "plugin": "acme",
        "provider": {"name": "acme", "version": "1.0"},
        "platform": "cpu",
        "device": "A CPU",
        "versions": {"opgraft": "0.1.0", "torch": "2.13", "python": "3.11.7"},
        "brief": False,
        "ops": {"gelu": "gelu"},
    }
    kept = evidence.ConformanceEvidence(about, cases=8)
    for each in answers(**package()):
        kept.add(each.to_dict())
    file = tmp_path / "evidence.json"
    evidence.write(file, kept.to_dict())
    data = json.loads(file.read_text())
    assert errors_of(data) == []
    assert data["lines"]["gelu"]["never_run"] == FAR
    assert evidence.read(file).lines() == kept.lines()
    # As older versions wrote the file.
    for each in data["outcomes"]:
        del each["lines"]
    file.write_text(json.dumps(data))
    assert evidence.read(file).lines() == {}


TWO_FORMS = """
import torch
from opgraft.ops import GemmaRMSNorm
platforms = "any"

@GemmaRMSNorm.register_oot
class Acme(GemmaRMSNorm):
    def forward_oot(self, x, residual=None):
        if residual is None:
            return self.forward_native(x)
        if x.dim() > 9:
            raise ValueError
        return self.forward_native(x, residual)
"""


def test_a_line_that_one_form_of_an_op_reaches(site, cli) -> None:
    """The forms with and without a residual share a kernel, and each takes the other branch."""
    site.plugin("acme", TWO_FORMS)
    told = cli("plugins", "check", "acme").stdout.splitlines()
    assert [line for line in told if "never run" in line] == [
        "never run: gemma_rms_norm: acme.py:12"
    ]


def test_a_line_that_only_failed_checks_run_is_no_line_that_never_ran(site, cli) -> None:
    """A wrong branch fails each check that takes it, and was reached all the same."""
    wrong = TWO_FORMS.replace("forward_native(x, residual)", "forward_native(x, 2 * residual)")
    site.plugin("acme", wrong)
    told = cli("plugins", "check", "acme").stdout.splitlines()
    assert any(line.startswith("failed: fused_add_gemma_rms_norm") for line in told)
    assert [line for line in told if "never run" in line] == [
        "never run: gemma_rms_norm: acme.py:12"
    ]


@pytest.mark.parametrize(
    ("range_of_lines", "answers_of_file"),
    [
        ("acme.py:1-1000000000000", 1),
        ("acme.py:x", 1),
        ("acme.py", 1),
        # Each alone is one that a kernel may have.
        ("acme{number}.py:1-1000000", 4),
    ],
)
def test_a_file_with_other_lines_is_no_evidence(
    tmp_path, range_of_lines: str, answers_of_file: int
) -> None:
    """A package may ship any file, and no file makes a list of some million lines."""
    about = dict.fromkeys(("plugin", "platform", "device", "brief"), "")
    about |= {"provider": {"name": "acme", "version": "1"}, "versions": {}}
    kept = evidence.ConformanceEvidence(about, cases=answers_of_file)
    for number in range(answers_of_file):
        told = {"op": "gelu", "check": str(number), "dtype": None}
        kept.add({**told, "status": "passed", "reason": ""})
    data = kept.to_dict()
    for number, outcome in enumerate(data["outcomes"]):
        ranges = [range_of_lines.format(number=number)]
        outcome["lines"] = {"run": [], "never_run": ranges, "unknown": ""}
    file = tmp_path / "evidence.json"
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match="holds no evidence"):
        evidence.read(file)


ALL_REACHED = """
if input.dim() == 1:
    return torch.nn.functional.gelu(input, approximate=self.approximate)
try:
    if not input.numel():
        raise LookupError(
            "empty"
        )
except LookupError:
    return torch.empty_like(input)
parts = [torch.nn.functional.gelu(part, approximate=self.approximate)
         for part in input.unbind(0)]
return (lambda: torch.stack(parts))()
"""


def test_if_all_branches_are_reached_nothing_is_told(answers) -> None:
    """Neither a handler of errors nor a comprehension nor a lambda is taken for a line that never ran."""
    lines = lines_of(answers(module(ALL_REACHED)))
    assert lines is not None
    assert (lines.never_run, lines.unknown) == ((), "")
    assert lines.run[0].startswith("acme.py:9-")


GELU = "torch.nn.functional.gelu(input, approximate=self.approximate)"
OPERATOR = """
@torch.library.custom_op("acme::gelu", mutates_args=())
def operator(input: torch.Tensor, approximate: str) -> torch.Tensor:
    if input.dim() > 9:
        input = input + 1
    return torch.nn.functional.gelu(input, approximate=approximate)
"""
LIBRARY = """
import ctypes
LIBRARY = ctypes.CDLL(None)
def magnitude(number):
    return LIBRARY.abs(number)
"""


def test_code_behind_an_operator_in_python_is_watched(answers) -> None:
    """The operator is called by compiled code of torch, and is Python itself."""
    lines = lines_of(answers(module("return operator(input, self.approximate)", OPERATOR)))
    assert lines == ReachedLines(("acme.py:8", "acme.py:10", "acme.py:15"), ("acme.py:9",))


def test_branches_of_compiled_code_are_not_known(answers, site, cli) -> None:
    """The lines in Python are told all the same."""
    body = f"if magnitude(-1) > 1:\n    raise ValueError\nreturn {GELU}"
    lines = lines_of(answers(module(body, LIBRARY)))
    assert lines is not None
    assert lines.never_run == ("acme.py:15",)
    assert lines.unknown == reached_lines.COMPILED
    told = cli("plugins", "check", "acme").stdout
    assert f"not known which branches ran, as {reached_lines.COMPILED}: gelu" in told


BUILT_IN = """
from opgraft import FunctionalKernels
from opgraft.ops import ReLU
import torch
platforms = "any"

@ReLU.register_oot
class Acme(ReLU):
    functional_oot = FunctionalKernels({"relu": torch.relu})
"""
CALLABLE = """
from opgraft import FunctionalKernels
from opgraft.ops import ReLU
import torch
platforms = "any"

class Kernel:
    def __call__(self, x):
        if x.dim() > 9:
            return x
        return torch.relu(x)

@ReLU.register_oot
class Acme(ReLU):
    functional_oot = FunctionalKernels({"relu": Kernel()})
"""


@pytest.mark.parametrize(
    ("source", "never_run", "unknown"),
    [(BUILT_IN, (), reached_lines.COMPILED), (CALLABLE, ("acme.py:10",), "")],
)
def test_a_kernel_that_is_no_function(
    answers, source: str, never_run: tuple[str, ...], unknown: str
) -> None:
    """Of a built-in function nothing is known. An object that is called has code of its own."""
    lines = lines_of(answers(source))
    assert lines is not None
    assert (lines.never_run, lines.unknown) == (never_run, unknown)


def test_a_slow_kernel_is_watched_in_a_sample(answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing takes time. Most calls then go without, and the answer says so."""
    monkeypatch.setattr(reached_lines, "MOST_EVENTS", 20)
    lines = lines_of(
        answers(
            module(
                f"for _ in range(3):\n    out = {GELU}\nif input.dim() > 9:\n    pass\nreturn out"
            )
        )
    )
    assert lines is not None
    assert lines.unknown == reached_lines.IN_A_SAMPLE


def test_a_debugger_keeps_its_place(answers) -> None:
    """One function traces a thread: the answer says why nothing was noted."""

    def debugger(*_: Any) -> None:
        return None

    before = threading.gettrace()
    sys.settrace(debugger)
    try:
        found = answers(module(f"return {GELU}"))
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(None)
    assert threading.gettrace() is before
    assert {each.lines and each.lines.unknown for each in found} == {reached_lines.OTHER_TRACER}


IN_A_THREAD = """
out = []
def work():
    if input.dim() > 9:
        out.append(0)
    out.append(torch.nn.functional.gelu(input, approximate=self.approximate))
def other():
    return 0
thread = threading.Thread(target=work)
thread.start()
thread.join()
return out[0]
"""


def test_threads_of_a_kernel_are_watched(answers) -> None:
    """A function in the kernel that nobody calls is told, too."""
    lines = lines_of(answers(module(IN_A_THREAD, "import threading")))
    assert lines is not None
    assert (lines.never_run, lines.unknown) == (("acme.py:12", "acme.py:15"), "")


POOL = """
from concurrent.futures import ThreadPoolExecutor
POOL = ThreadPoolExecutor(1)
"""
IN_A_POOL = """
def work():
    return torch.nn.functional.gelu(input, approximate=self.approximate)
return POOL.submit(work).result()
"""


def test_threads_of_a_pool_lose_the_tracer(answers) -> None:
    """The thread stays, and answers of later watches say that not all lines are known."""
    found = answers(module(IN_A_POOL, POOL))
    pool = sys.modules["acme"].POOL
    try:
        pool.submit(ignore).result()
        assert pool.submit(sys.gettrace).result() is None
    finally:
        pool.shutdown()
    of_gelu = [each.lines for each in found if each.op == "gelu" and each.lines]
    assert len(of_gelu) > 3
    assert {each.unknown for each in of_gelu} == {reached_lines.OTHER_THREADS}


def ignore() -> None:
    pass


KEPT = """
import threading
from queue import SimpleQueue
JOBS, RESULTS = SimpleQueue(), SimpleQueue()
THREADS = []
def loop():
    while (job := JOBS.get()) is not None:
        RESULTS.put(torch.relu(job) if job is not threading else sys.gettrace())
"""
IN_A_KEPT_THREAD = """
if not THREADS:
    THREADS.append(threading.Thread(target=loop))
    THREADS[0].start()
return torch.nn.functional.gelu(input, approximate=self.approximate)
"""


def test_a_thread_that_a_kernel_keeps_loses_the_tracer(answers) -> None:
    """A thread may run in a function of the plugin for ever, and call no other in Python."""
    found = answers(module(IN_A_KEPT_THREAD, f"import sys\n{KEPT}"))
    acme = sys.modules["acme"]
    try:
        acme.JOBS.put(torch.ones(1))
        acme.RESULTS.get()
        acme.JOBS.put(threading)
        assert acme.RESULTS.get() is None
    finally:
        acme.JOBS.put(None)
        acme.THREADS[0].join()
    unknown = {each.lines.unknown for each in found if each.lines}
    assert reached_lines.OTHER_THREADS in unknown


def test_control_characters_of_a_file_name_are_harmless(answers) -> None:
    """A plugin chooses the names of its files."""
    made = (
        f"def kernel(self, input):\n    if input.dim() > 9:\n        return 0\n    return {GELU}\n"
    )
    source = module("pass").replace(
        "    def forward_oot(self, input):\n        pass\n",
        f"    exec(compile({made!r}, '/a\\x1b[31m.py', 'exec'))\n    forward_oot = kernel\n",
    )
    lines = lines_of(answers(source))
    assert lines is not None
    assert lines.never_run == ("a\\x1b[31m.py:3",)
