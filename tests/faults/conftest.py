"""A plugin in order, beside which others have their faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import opgraft
import pytest
from conftest import Site
from support.faults.planting import GOOD, of_brix
from support.small_words import word_tokenizer

_seen: dict[str, Any] = {}


@pytest.fixture
def alone(site: Site) -> dict[str, Any]:
    """Install brix; what it gives others where it is alone."""
    site.plugin("brix", GOOD)
    if not _seen:
        _seen.update(of_brix())
        opgraft.reset()
    return _seen


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sentence encoder."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = word_tokenizer()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.BertConfig(vocab_size=len(tokenizer), **sizes)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    modules = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    rows = [
        {"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    return folder
