"""The work of ``opgraft trace``, in a module that imports torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from opgraft.base.files import replace_file
from opgraft.base.text import described, printable
from opgraft.binding.profiling import profile as naming_ops
from opgraft.cli.answer import asked, expect_answers, open_llm
from opgraft.cli.output import echo, print_json
from opgraft.config import CacheConfig, OpgraftConfig, ParallelConfig, set_config
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.stats import EngineStats
from opgraft.errors import ConfigError, InputError, RequestError
from opgraft.models.build import generates
from opgraft.serving.engine_settings import engine_config
from opgraft.serving.llm import LLM
from opgraft.serving.outputs import RequestOutput
from torch.profiler import profile, record_function

_PROMPTS = ("Once upon a time",)
_MEASURED = OpgraftConfig(
    # The profiler sees its own process only.
    parallel=ParallelConfig(executor="in_process"),
    # The first step is to compute the prompts.
    cache=CacheConfig(prefix_reuse=False),
)
_READABLE = 0o644


class StepRecorder:
    """Records each step as a range of torch's profiler. ``LLM`` takes this as ``on_step``.

    Args:
        most: steps to record.

    Attributes:
        steps: recorded so far.
    """

    def __init__(self, most: int) -> None:
        self.steps = 0
        self._most = most
        self._profiler = profile()
        self._recording = False
        self._step = ExitStack()

    def start(self) -> None:
        """Record from now on. The profiler records the thread that calls this."""
        self._profiler.start()
        self._recording = True
        self._begin_step()

    def __call__(self, stats: EngineStats, outputs: Sequence[RequestOutput]) -> None:
        """End the range of a step, and begin the next one."""
        if not self._recording:
            return
        self._step.close()
        self.steps += 1
        # A long prompt takes several steps, and the answers go on.
        if self.steps == self._most:
            self.stop()
        else:
            self._begin_step()

    def stop(self) -> None:
        """Record no more. The thread of ``start`` calls this."""
        if self._recording:
            self._recording = False
            self._step.close()
            self._profiler.stop()

    def trace(self) -> bytes:
        """Return the recorded ranges as JSON, as Chrome and Perfetto read it."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(file))
            return file.read_bytes()

    def _begin_step(self) -> None:
        self._step.enter_context(record_function(f"opgraft step {self.steps}"))


def record_trace(
    model: str, prompts: Sequence[str], file: Path, steps: int, *, as_json: bool
) -> None:
    """Record the steps that answer prompts, and write the trace.

    Args:
        model: a checkpoint or its name.
        prompts: to answer together; without any, a sample is answered.
        file: to write.
        steps: to record.
        as_json: print JSON.

    Raises:
        RequestError: the model is an encoder, or a prompt cannot be answered.
        ConfigError: the settings have several replicas.
        DistributedError: the settings split the model over several processes.
        InputError: the file cannot be written.
    """
    _expect_folder(file)
    recorder = StepRecorder(steps)
    with set_config(_MEASURED, origin="opgraft trace"):
        config = engine_config(model, None, {}).resolved()
        if config.parallel.data > 1:
            raise ConfigError(
                f"parallel.data is {config.parallel.data}, and 'opgraft trace' records one engine: "
                "leave it out"
            )
        if not generates(config):
            raise RequestError(
                f"{model} is an encoder, and 'opgraft trace' records answers to prompts: give a "
                "decoder"
            )
        llm = open_llm(model, recorder)
        try:
            _record(llm, prompts or _PROMPTS, recorder, steps)
        finally:
            llm.shutdown()
    if recorder.steps < steps:
        message = f"recorded {recorder.steps} steps of {steps}: the answers ended before"
        click.echo(message, err=True)
    trace = recorder.trace()
    try:
        replace_file(file, trace, _READABLE)
    except OSError as error:
        raise InputError(f"the trace cannot be written to {file}: {described(error)}") from error
    told = {"file": str(file), "steps": recorder.steps, "bytes": len(trace)}
    if as_json:
        print_json("opgraft.trace/1", told)
        return
    echo(f"{printable(str(file))}: {recorder.steps} steps, {len(trace):,} bytes")
    echo("open it in https://ui.perfetto.dev")


def _expect_folder(file: Path) -> None:
    """Check that a file can be written, before a model is loaded for it.

    Raises:
        InputError: the folder is missing, or nothing can be written there.
    """
    folder = Path(os.path.realpath(file)).parent
    if os.access(folder, os.W_OK | os.X_OK):
        return
    reason = "cannot be written" if folder.is_dir() else "is no folder"
    raise InputError(
        f"the trace cannot be written to {file}: {folder} {reason}, so name a file elsewhere"
    )


def _record(llm: LLM, texts: Sequence[str], recorder: StepRecorder, steps: int) -> None:
    """Answer prompts, and record the steps.

    Raises:
        RequestError: a prompt cannot be answered.
    """
    # A prefill and a step of decoding prepare kernels and memory.
    asked(llm, texts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    with naming_ops():
        # Calls of the engine's thread, which the profiler is to record.
        [started] = llm.replicas.on_engines(lambda engine: recorder.start())
        started.result()
        try:
            outputs = asked(llm, texts, params)
        finally:
            [stopped] = llm.replicas.on_engines(lambda engine: recorder.stop())
            stopped.result()
    expect_answers(llm, outputs)
