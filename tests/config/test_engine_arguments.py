"""Arguments of vLLM's engine: as keywords of ``LLM``, and as options of the command line."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner
from opgraft import CompilationConfig, CompilationMode, OpgraftConfig
from opgraft.cli.output import SettingsCommand, echo, with_settings
from opgraft.cli.serve import command as serve
from opgraft.config import FIELDS
from opgraft.config.engine_arguments import SHORT_NAMES, advice_about, advice_about_option
from opgraft.errors import ConfigError
from opgraft.registry.state import host_state
from opgraft.serving.engine_settings import engine_config


@click.command(cls=SettingsCommand)
@with_settings
def show() -> None:
    """Print settings of compilation."""
    compilation = host_state().settings().config.compilation_config
    echo(f"{compilation.level} {compilation.mode} {compilation.compile_sizes}")


def config(**settings: Any) -> OpgraftConfig:
    return engine_config("nowhere", None, settings)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(show, arguments)
    error = result.exception
    # The group, which is not here, prints errors of opgraft.
    told = "" if error is None or isinstance(error, SystemExit) else str(error)
    return result.exit_code, f"{result.output}{told}"


def test_each_short_name_is_a_setting() -> None:
    """Every keyword of LLM stands for a setting that exists."""
    assert set(SHORT_NAMES.values()) <= set(FIELDS)


def test_enforce_eager_is_level_0() -> None:
    """True sets level 0, False sets nothing, and another value is an error."""
    assert config(enforce_eager=True).compilation_config.level == 0
    assert config(enforce_eager=False).compilation_config.level is None
    with pytest.raises(ConfigError, match="enforce_eager is 1: use True, which is level 0"):
        config(enforce_eager=1)
    with pytest.raises(ConfigError, match=r"both stand for compilation_config\.level: leave"):
        config(enforce_eager=True, **{"compilation_config.level": 2})


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "FULL", "compile_sizes": [1]},
        {"mode": 3, "compile_sizes": (1,)},
        CompilationConfig(mode=CompilationMode.FULL, compile_sizes=(1,)),
    ],
)
def test_a_compilation_config_is_taken_as_a_whole(given: object) -> None:
    """LLM takes a mapping or a CompilationConfig."""
    found = config(compilation_config=given).compilation_config
    assert (found.mode, found.compile_sizes) == (CompilationMode.FULL, (1,))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cudagraph_mode": "FULL"}, "has no key 'cudagraph_mode': it is 'graph_mode' here"),
        ({"lvel": 1}, "has no key 'lvel': did you mean 'level'"),
        ("FULL", "compilation_config is 'FULL': use a mapping"),
        ({"level": 9}, "compilation_config.level is 9"),
    ],
)
def test_a_wrong_compilation_config_is_told(given: object, message: str) -> None:
    """The error names the key and the setting that is meant."""
    with pytest.raises(ConfigError, match=message):
        config(compilation_config=given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu_memory_utilization", r"set cache\.memory_share"),
        ("distributed_executor_backend", r"set parallel\.executor"),
        ("trust_remote_code", "no code of a checkpoint runs"),
        ("max_num_seq", "did you mean 'max_num_seqs'"),
        ("parallel.tensr", r"unknown setting 'parallel\.tensr': did you mean 'parallel\.tensor'"),
    ],
)
def test_other_arguments_of_vllm_name_the_setting(name: str, message: str) -> None:
    """A keyword that LLM does not take is an error with the next step."""
    with pytest.raises(ConfigError, match=message):
        config(**{name: 1})


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--tensor-parallel-size", "use --parallel.tensor"),
        ("--tensor-parallel-size=2", "use --parallel.tensor"),
        ("-tp", "use --parallel.tensor"),
        ("--pipeline_parallel_size", "use --parallel.pipeline"),
        ("--no-enable-prefix-caching", "use --cache.prefix_reuse false"),
        ("--compilation-config.mode", "use --compilation_config.mode"),
        ("--served-model-name", "use --server.model_name"),
        ("--swap-space", "nothing is swapped: a request that gives way is computed anew"),
        ("--frobnicate", None),
    ],
)
def test_an_option_of_vllm_names_the_option_to_use(option: str, advice: str | None) -> None:
    """The hint is the option's spelling here; an unknown option has no hint."""
    assert advice_about_option(option) == advice
    code, output = run(option, "2")
    words = " ".join(output.split())
    assert code == 2
    name = option.partition("=")[0]
    assert (f"{name} is an option of vLLM: {advice}" if advice else "No such option") in words


COMMON = """
    --additional-config --allowed-origins --async-scheduling --attention-backend --block-size
    --chat-template-content-format --code-revision --convert --cpu-offload-gb
    --cudagraph-capture-sizes --data-parallel-size --default-chat-template-kwargs
    --disable-log-requests --disable-log-stats --distributed-executor-backend --download-dir
    --enable-auto-tool-choice --enable-chunked-prefill --enable-eplb --enable-expert-parallel
    --enable-log-requests --enable-prefix-caching --enable-prompt-tokens-details
    --enable-request-id-headers --generation-config --gpu-memory-utilization
    --guided-decoding-backend --hf-config-path --hf-overrides --kv-cache-dtype
    --kv-cache-memory-bytes --limit-mm-per-prompt --load-format --master-addr --master-port
    --max-cpu-loras --max-cudagraph-capture-size --max-logprobs --max-lora-rank --max-loras
    --max-num-batched-tokens --max-seq-len-to-capture --mm-processor-kwargs --model-impl --nnodes
    --node-rank --num-gpu-blocks-override --optimization-level --override-generation-config
    --pipeline-parallel-size --quantization --reasoning-parser --revision --root-path --rope-scaling
    --runner --scheduling-policy --seed --served-model-name --speculative-config --spec-method
    --spec-model --spec-tokens --ssl-ca-certs --ssl-certfile --ssl-keyfile
    --structured-outputs-config --swap-space --task --tensor-parallel-size --tokenizer
    --tokenizer-mode --tokenizer-revision --tool-call-parser --trust-remote-code
    --trust-request-chat-template --uds --use-tqdm-on-load --uvicorn-log-level -dp -ep -pp -q -sc -tp
"""
"""The options of ``vllm serve`` that guides and recipes name, up to vLLM 0.33."""

OPTIONS_OF_SERVE = {option for each in serve.params for option in each.opts}


@pytest.mark.parametrize("option", COMMON.split())
def test_each_common_option_of_vllm_has_a_hint(option: str) -> None:
    """The hint names the next step: an option of serve that exists, a file, or to leave the option out."""
    advice = advice_about_option(option)
    assert advice
    used = {word.rstrip(",") for word in advice.split() if word.startswith("--")}
    assert used <= OPTIONS_OF_SERVE


@pytest.mark.parametrize("name", [*SHORT_NAMES, "gpu_memory_utilization", "device"])
def test_each_advice_leads_to_a_setting(name: str) -> None:
    """An advice names a setting that exists."""
    words = (advice_about(name) or "").replace(",", " ").split()
    assert [word for word in words if word in FIELDS]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--enforce-eager"], "0 0 ()"),
        (["--compilation-config", '{"level": 3}'], "3 3 (1,)"),
        (["--compilation-config", '{"mode": "FULL", "compile_sizes": [2]}'], "None 3 (2,)"),
        ([], "None 0 ()"),
    ],
)
def test_options_with_the_spelling_of_vllm(arguments: list[str], expected: str) -> None:
    """--enforce-eager is level 0, --compilation-config takes a JSON object."""
    code, output = run(*arguments)
    assert (code, output.strip()) == (0, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--enforce-eager", "--compilation_config.level", "2"],
            "both set compilation_config.level: leave one out",
        ),
        (["--compilation-config", "{"], "--compilation-config '{' is no JSON"),
        (["--compilation-config", "[]"], "use a mapping, such as {'level': 2}"),
    ],
)
def test_what_is_wrong_with_such_options(arguments: list[str], message: str) -> None:
    """Two options for one setting, and text that is no object, are errors."""
    code, output = run(*arguments)
    assert code != 0
    assert message in " ".join(output.split())
