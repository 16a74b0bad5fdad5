"""``generation_config.json`` has defaults of sampling, which requests and the operator can replace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opgraft import LLM, SamplingParams
from opgraft.errors import CheckpointError, ConfigError
from support.small_words import word_llama

QUIET: dict[str, Any] = {"load.progress": False, "cache.num_blocks": 64}
CONTENT = {
    "temperature": 0.0,
    "top_k": 7,
    "max_new_tokens": 3,
    "do_sample": True,
    "eos_token_id": 2,
}


def written(folder: Path, **content: Any) -> str:
    model = word_llama(folder)
    (Path(model) / "generation_config.json").write_text(json.dumps(content), "utf-8")
    return str(model)


def test_defaults_of_the_checkpoint(tmp_path: Path) -> None:
    """A call without settings has them; settings of a call take their place as a whole, as in vLLM."""
    with LLM(written(tmp_path, **CONTENT), **QUIET) as llm:
        defaults = llm.get_default_sampling_params()
        assert defaults == SamplingParams(temperature=0.0, top_k=7, max_tokens=3)
        (output,) = llm.generate("the cat")
        (same,) = llm.generate("the cat", defaults)
        assert output.outputs[0].token_ids == same.outputs[0].token_ids
        assert len(output.outputs[0].token_ids) <= 3
        (longer,) = llm.generate("the cat", SamplingParams(max_tokens=9, ignore_eos=True))
        assert len(longer.outputs[0].token_ids) == 9


def test_an_operator_leaves_them_out(tmp_path: Path) -> None:
    """Then the defaults are those of ``SamplingParams``."""
    model = written(tmp_path, **CONTENT)
    with LLM(model, generation_config="none", **QUIET) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ConfigError, match="use none, which leaves"):
        LLM(model, generation_config="vllm", **QUIET)


def test_a_wrong_default(tmp_path: Path) -> None:
    """The error names the file, and the setting that leaves it out."""
    model = written(tmp_path, top_p=7)
    with pytest.raises(CheckpointError, match=r"generation_config.json has .*top_p.*to none"):
        LLM(model, **QUIET)
