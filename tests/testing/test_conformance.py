"""The conformance kit: plugins that conform pass, as pytest runs it for their authors, and it costs others nothing."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from opgraft.config import CompilationConfig, OpgraftConfig, set_config
from opgraft.errors import ConfigError
from opgraft.ops import GELU, RMSNorm
from opgraft.registry.state import host_state
from opgraft.testing import isolated_host
from opgraft.testing.check_table import (
    CHECKS,
    OP,
    PLATFORM,
    PLUGIN,
    SUMMARIES,
    CheckAnswer,
    together,
)
from opgraft.testing.conformance import CheckOutcome, Conformance, alone
from support.own_tests import PLUGINS, own_tests


@pytest.mark.parametrize(
    "options", [("--opgraft-brief",), pytest.param((), marks=pytest.mark.slow)]
)
def test_the_toy_npu_conforms(
    toy_npu_site: Path, warm_python: str, options: tuple[str, ...]
) -> None:
    """Its test file, which is the class of the kit and a name, passes; its kernels are among what was asked."""
    result = own_tests(warm_python, "opgraft-toy-npu", toy_npu_site, "-rp", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    for case in (
        "(platform)-memory",
        "rms_norm-values-bfloat16",
        "gelu-gradients",
        "silu_and_mul-compilation",
    ):
        assert f"::test_conforms[{case}]\n" in result.stdout


def test_a_test_file_of_the_kit_is_short() -> None:
    """A plugin's whole test file is under 20 lines."""
    for file in PLUGINS.glob("*/tests/test_conformance.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) < 20


FAILING = """
import torch
from opgraft.ops import GELU
def test_op():
    GELU()(torch.ones(2))
def test_nothing_of_ours():
    assert False
"""


def test_pytest_tells_which_op_raised(site, tmp_path: Path, warm_python: str) -> None:
    """The report of a test that failed has a section with op, provider and setting, where an op raised."""
    site.plugin("acme", WRONG.replace("torch.nn.functional.gelu(input.detach())", "input.nothing"))
    (tmp_path / "test_ops.py").write_text(FAILING)
    environ = {
        **os.environ,
        "PYTHONPATH": str(site.folder),
        "COLUMNS": "200",
        "OPGRAFT_PLUGINS": "acme",
    }
    command = [warm_python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    sections = re.findall(r"-+ opgraft -+\n(.*)\n", ended.stdout)
    assert ended.returncode == 1
    assert len(sections) == 1, ended.stdout
    assert sections[0].startswith("raised in op gelu, by AcmeGELU.forward_oot of acme 1.0 at ")
    assert "OPGRAFT_PROVIDERS=gelu=native" in sections[0]


def test_pytest_starts_without_torch(tmp_path: Path) -> None:
    """Where no test uses the kit, pytest has imported neither torch nor any module of opgraft but the package's own."""
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    code = (
        "import sys, pytest; pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]); "
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'opgraft')])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    loaded = result.stdout.strip().splitlines()[-1]
    expected = {
        "opgraft",
        "opgraft.base",
        "opgraft.base.collector",
        "opgraft.base.upward",
        "opgraft.base.version",
        "opgraft.testing",
        "opgraft.testing.pytest_plugin",
    }
    assert set(ast.literal_eval(loaded)) == expected


WRONG = """
import torch
from opgraft.ops import GELU
platforms = "any"

@GELU.register_oot
class AcmeGELU(GELU):
    def forward_oot(self, input):
        return torch.nn.functional.gelu(input.detach())  # whatever approximation is asked for
"""


ASKED = ("loading", "reachable", "values", "gradients", "operators")


def test_failures_and_skips_say_why(site) -> None:
    """A check that fails names variant, inputs and error; one that does not apply gives the reason."""
    site.plugin("acme", WRONG)
    with alone("acme"):
        conformance = Conformance("acme")
        told = {
            str(case): conformance.judge(case) for case in conformance.cases if case.check in ASKED
        }
    assert told["(plugin)-loading"].status == told["gelu-reachable"].status == "passed"
    values, gradients, operators = (
        told[f"gelu-{name}"] for name in ("values-float32", "gradients", "operators")
    )
    assert (values.status, gradients.status, operators.status) == ("failed", "failed", "skipped")
    assert values.reason.startswith("variant 'tanh': of inputs (1,) by 1 in torch.float32: ")
    assert "AcmeGELU.forward_oot loses gradients" in gradients.reason
    assert operators.reason == "it runs no operator of its own"


def judged(plugin: str, *checks: str) -> dict[str, CheckOutcome]:
    """Answer the questions of some checks, in the order in which they are asked."""
    with alone(plugin):
        conformance = Conformance(plugin)
        return {
            str(case): conformance.judge(case) for case in conformance.cases if case.check in checks
        }


def test_a_class_that_is_made_when_the_plugin_registers(site) -> None:
    """Loaded again it is another class of the same name, and that one is what later checks are about."""
    kernel = """
    class AcmeGELU(GELU):
        def forward_oot(self, input):
            return torch.nn.functional.gelu(input, approximate=self.approximate)
    GELU.register_oot(AcmeGELU)
"""
    hook = "import opgraft, torch\nfrom opgraft.ops import GELU\nplatforms = 'any'\n@opgraft.hookimpl\n"
    site.plugin("acme", f"{hook}def opgraft_register_ops():{kernel}")
    told = judged("acme", "isolation", "reachable", "state", "strides")
    assert [(name, each.reason) for name, each in told.items() if each.status == "failed"] == []


CHOOSY = """
import torch
from opgraft.ops import GELU
platforms = "any"

@torch.library.custom_op("acme_choosy{number}::gelu", mutates_args=())
def choosy(x: torch.Tensor, approximate: str) -> torch.Tensor:
    if x.shape[-1] < 100:
        raise ValueError("rows are too short")
    return torch.nn.functional.gelu(x, approximate=approximate)
choosy.register_fake(lambda x, approximate: x.new_empty({shape}))

@GELU.register_oot
class AcmeGELU(GELU):
    def forward_oot(self, input):
        try:
            return torch.ops.acme_choosy{number}.gelu(input, self.approximate)
        except ValueError:
            return torch.nn.functional.gelu(input, approximate=self.approximate)
"""


@pytest.mark.parametrize(
    ("number", "shape", "status"), [(0, "x.shape", "passed"), (1, "1", "failed")]
)
def test_an_operator_that_refuses_what_is_computed_otherwise(
    site, number: int, shape: str, status: str
) -> None:
    """It is asked with inputs that it takes: what it raises for others, which its kernel catches, is no failure."""
    site.plugin("acme", CHOOSY.format(number=number, shape=shape))
    told = judged("acme", "operators")["gelu-operators"]
    assert told.status == status, told.reason
    assert "rows are too short" not in told.reason


COMPILED = """
import torch
from opgraft.ops import GELU
platforms = "any"
compiled = torch.compile(torch.nn.functional.gelu, backend="inductor")

@GELU.register_oot
class AcmeGELU(GELU):
    def forward_oot(self, input):
        return compiled(input, approximate=self.approximate)
"""


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")
def test_a_compiled_kernel_runs_no_operator_of_its_own(site) -> None:
    """Operators of torch's profiler run in what is compiled, and are not those of the plugin."""
    site.plugin("acme", COMPILED)
    told = judged("acme", "operators")["gelu-operators"]
    assert told.reason == "it runs no operator of its own"
    torch.compiler.reset()


LOCAL = """
import os, torch
from opgraft.ops import GELU
platforms = "any"

@GELU.register_oot
class AcmeGELU(GELU):
    def {kernel}(self, input):
        return {factor} * torch.nn.functional.gelu(input, approximate=self.approximate)
    {more}
"""


@pytest.mark.usefixtures("warm_workers")
def test_another_process_has_the_same_settings(site) -> None:
    """A scope that switches off a kernel, which is wrong, does so where ops are sent to."""
    site.plugin("acme", LOCAL.format(kernel="forward_oot", factor=2, more=""))
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=("-gelu",)))):
        spawned = judged("acme", "spawn")["(plugin)-spawn"]
    assert (spawned.status, spawned.reason) == ("passed", "")


@pytest.mark.usefixtures("warm_workers")
def test_another_kernel_in_another_process(site) -> None:
    """It computes the same, and is not the kernel that is asked about."""
    more = f"locals()['forward_oot' if os.getpid() == {os.getpid()} else 'forward_cpu'] = kernel"
    site.plugin("acme", LOCAL.format(kernel="kernel", factor=1, more=more))
    spawned = judged("acme", "spawn")["(plugin)-spawn"]
    assert spawned.status == "failed"
    assert "gelu, which runs AcmeGELU.forward_cpu, here AcmeGELU.forward_oot" in spawned.reason


OTHER = """
from opgraft.ops import {base}
platforms = "any"

@{base}.register_oot
class Other({base}):
    def forward_oot(self, {argument}):
        return self.forward_native({argument})
"""


@pytest.mark.parametrize(
    ("base", "status", "reason"),
    [
        (None, "skipped", "no other plugin is installed that may run here"),
        ("SiluAndMul", "passed", ""),
        ("GELU", "failed", "together with"),
    ],
)
def test_two_plugins_together(site, base: str | None, status: str, reason: str) -> None:
    """Beside another plugin it does the same; one that replaces the same op is a conflict, which names both."""
    site.plugin("acme", LOCAL.format(kernel="forward_oot", factor=1, more=""))
    if base:
        site.plugin("other", OTHER.format(base=base, argument="input" if base == "GELU" else "x"))
    told = judged("acme", "together", "reachable")
    found = told["(plugin)-together"]
    assert (found.status, found.reason.startswith(reason)) == (status, True), found.reason
    assert ("other 1.0" in found.reason) == (status == "failed")
    assert told["gelu-reachable"].status == "passed"


def test_plugins_that_may_not_run_here_are_no_company(site) -> None:
    """That of a device which is absent, or for another opgraft, is nothing that a plugin is to be tried beside."""
    site.plugin("acme", LOCAL.format(kernel="forward_oot", factor=1, more=""))
    other = OTHER.format(base="SiluAndMul", argument="x")
    site.platform("brix", probe="return Evidence(False, 'no device')", plugin=other)
    site.plugin("dune", other, requires=("opgraft>=9",))
    found = judged("acme", "together")["(plugin)-together"]
    assert (found.status, found.reason) == (
        "skipped",
        "no other plugin is installed that may run here",
    )


OWN = """
from opgraft import CustomOp
platforms = "any"

@CustomOp.register("acme_own")
class Own(CustomOp):
    def forward_native(self, x):
        return x

@Own.register_oot
class Acme(Own):
    def forward_oot(self, x):
        return x
"""


def test_nothing_to_send_is_no_answer(site) -> None:
    """Where no module of the plugin stands for a form, sending ops to a process is skipped, and says why."""
    site.plugin("acme", OWN)
    spawned = judged("acme", "spawn")["(plugin)-spawn"]
    assert spawned.status == "skipped"
    assert "no op to send" in spawned.reason


def test_what_a_plugin_asserts_is_shown_harmlessly(site) -> None:
    """The message of an AssertionError is the plugin's own text: marks that reorder it are escapes."""
    wrong = WRONG.replace(
        "return torch", "raise AssertionError('\\u202edne\\x1b[2J')\n        return torch"
    )
    site.plugin("acme", wrong)
    told = judged("acme", "strides")["gelu-strides"]
    assert told.status == "failed"
    assert r"\u202edne\x1b[2J" in told.reason


def test_the_table_of_checks() -> None:
    """Each row has a name of its own, and the short form asks some checks of each kind."""
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for of in (PLUGIN, PLATFORM, OP):
        assert [check for check in CHECKS if check.of == of and check.brief]
    assert not [check.name for check in CHECKS if check.brief and check.timed]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([CheckAnswer(error=0.1), CheckAnswer(error=0.3)], CheckAnswer(error=0.3)),
        ([CheckAnswer.of(None), CheckAnswer.of("no operator")], CheckAnswer()),
        (
            [CheckAnswer.of("one reason"), CheckAnswer.of("another")],
            CheckAnswer(skipped="one reason"),
        ),
        ([], CheckAnswer()),
    ],
)
def test_variants_have_one_answer_together(
    answers: list[CheckAnswer], expected: CheckAnswer
) -> None:
    """The largest error counts, and a check is skipped if no variant can be asked."""
    assert together(answers) == expected


def test_the_page_lists_the_checks() -> None:
    """The table of the how-to has each check of the kit, in its words."""
    page = (PLUGINS.parent / "docs/how-to/check-a-plugin.md").read_text(encoding="utf-8")
    rows = (
        page.partition("| check | passing means |\n|---|---|\n")[2]
        .partition("\n\n")[0]
        .splitlines()
    )
    assert rows == [f"| `{name}` | {summary} |" for name, summary in SUMMARIES.items()]


@pytest.mark.parametrize(
    ("wrong", "check", "reason"),
    [
        (
            '@GELU.register_oot(name="Gelux")',
            "registration",
            "replaces 'Gelux', which no registered op answers to",
        ),
        ("raise OSError('no driver')", "loading", "OSError: no driver"),
    ],
)
def test_a_plugin_that_does_not_load(site, wrong: str, check: str, reason: str) -> None:
    """What keeps a plugin, or a part of it, from being loaded is an answer, and no more is asked than can be."""
    site.plugin("acme", WRONG.replace("@GELU.register_oot", wrong))
    with alone("acme"):
        conformance = Conformance("acme")
        answers = [
            conformance.judge(case)
            for case in conformance.cases
            if case.check in ("loading", check)
        ]
    failed = [outcome for outcome in answers if outcome.status == "failed"]
    assert [outcome.check for outcome in failed] == [check]
    assert reason in failed[0].reason


def test_a_name_that_nothing_answers_to() -> None:
    """Asking about a plugin that is not installed is an error."""
    with pytest.raises(ConfigError, match="no plugin or platform 'akme' is installed"):
        Conformance("akme")


def test_a_test_has_a_host_of_its_own(site) -> None:
    """What a test declares is gone after it; what a plugin's module declared when it was imported is not."""
    site.plugin("acme", WRONG)
    for _ in range(2):
        with isolated_host():

            @RMSNorm.register_oot
            class Own(RMSNorm):
                def forward_oot(self, x, residual=None):
                    return x

            assert (GELU().op_class.__name__, RMSNorm(4).op_class.__name__) == ("AcmeGELU", "Own")
        assert [each.cls.__name__ for each in host_state().registry.replacements] == ["AcmeGELU"]
        assert not host_state().active
