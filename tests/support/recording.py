"""Models of every kind that opgraft runs, small and with random weights, for a record of the calls that they make."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import opgraft
import torch
from grafting.test_transformers import FAMILIES, build, inputs
from opgraft import OpgraftConfig, set_config
from opgraft.registry.op_classes import qualified
from opgraft.registry.recorded_calls import FORWARD, RecordedCall
from opgraft.registry.state import host_state
from opgraft.serving.llm import LLM  # its parts are registered before the record begins
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from support import counting_plugin
from support.engines import engine, prompts, recorded, serve
from support.quantized_files import logits_of, write
from support.quantized_formats import FORMATS
from support.random_decoders import (
    DECODERS,
    HYBRIDS,
    THROUGH_TRANSFORMERS,
    hybrid,
    through_transformers,
    written,
)
from support.small_words import word_tokenizer

Scene = Callable[[Path], None]
"""Runs a model, whose checkpoint goes to the folder."""

LONG = [1.0 + index / 4 for index in range(6)]
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("Llama", {"rope_type": "linear", "factor": 2.0}),
    "dynamic": ("Llama", {"rope_type": "dynamic", "factor": 2.0}),
    "ntk": ("Llama", {"rope_type": "ntk", "factor": 2.0}),
    "longrope": (
        "Phi3",
        {
            "rope_type": "longrope",
            "short_factor": LONG,
            "long_factor": LONG,
            "original_max_position_embeddings": 32,
        },
    ),
}
"""Kinds of ropes that none of the families has here: the family, and the rope's parameters."""

ENCODERS = ("Bert", "Roberta", "XLMRoberta", "Electra")
ONLINE = ("int8", "int8_dynamic", "int4", "fp8")
"""Formats in which a plain checkpoint is quantized as it is loaded."""


def scenes() -> dict[str, Scene]:
    """Every scene by name: written families, families through transformers, encoders, grafts and formats."""
    return {
        **{f"decoder {name}": _decoder(name) for name in DECODERS},
        **{f"rope {name}": _rope(name) for name in ROPES},
        **{f"hybrid {name}": _hybrid(name) for name in HYBRIDS},
        **{f"transformers {name}": _foreign(name) for name in THROUGH_TRANSFORMERS},
        **{f"encoder {name}": _encoder(name) for name in ENCODERS},
        **{f"graft {name}": _graft(name) for name in FAMILIES},
        "graft gpt2": _graft_gpt2,
        **{f"online {name}": _online(name) for name in ONLINE},
        **{f"checkpoint {name}": _checkpoint(name) for name in FORMATS},
    }


def record_all() -> Mapping[str, Sequence[RecordedCall]]:
    """Return the calls of every scene, and the examples of the ops that no scene calls."""
    record(list(scenes()))
    _examples()
    return _recorded()


def record(names: Sequence[str]) -> Mapping[str, Sequence[RecordedCall]]:
    """Return the calls that these scenes make, with every class replaced."""
    counting_plugin.SHAPES.clear()
    counting_plugin.opgraft_register_ops()
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            scenes()[name](Path(folder))
    return _recorded()


def _recorded() -> Mapping[str, Sequence[RecordedCall]]:
    return {
        key: [RecordedCall(*shape) for shape in shapes]
        for key, shapes in counting_plugin.SHAPES.items()
    }


def _serve(folder: Path, **changes: Any) -> None:
    with set_config(OpgraftConfig(**changes)):
        core = engine(folder)
        greedy, _ = recorded("greedy", prompts(9)[0], max_tokens=3)
        drawn, _ = recorded("drawn", prompts(3)[0], max_tokens=3, temperature=0.8, top_k=5)
        serve(core, [greedy, drawn])


def _decoder(name: str) -> Scene:
    def run(folder: Path) -> None:
        family, values = DECODERS[name]
        written(family, folder, **values)
        _serve(folder)

    return run


def _rope(name: str) -> Scene:
    def run(folder: Path) -> None:
        family, parameters = ROPES[name]
        written(family, folder)
        # Into the file, as transformers has no model with the rope "ntk".
        file = folder / "config.json"
        config = json.loads(file.read_text("utf-8"))
        config["rope_parameters"] = {"rope_theta": 1e4, **parameters}
        file.write_text(json.dumps(config), "utf-8")
        _serve(folder)

    return run


def _hybrid(name: str) -> Scene:
    def run(folder: Path) -> None:
        hybrid(name, folder)
        _serve(folder)

    return run


def _foreign(name: str) -> Scene:
    def run(folder: Path) -> None:
        through_transformers(name, folder)
        _serve(folder)

    return run


def _encoder(name: str) -> Scene:
    def run(folder: Path) -> None:
        import transformers

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = getattr(transformers, f"{name}Config")(
            **sizes, num_attention_heads=4, vocab_size=64, pad_token_id=0
        )
        getattr(transformers, f"{name}Model")(config).save_pretrained(folder)
        word_tokenizer().save_pretrained(folder)
        LLM(str(folder), **{"load.progress": False}).embed(["the cat sleeps", "a dog"])

    return run


def _graft(name: str) -> Scene:
    def run(folder: Path) -> None:
        with torch.inference_mode():
            model = build(name)
            opgraft.graft(model)
            model(**inputs(name))
        trained = build(name).train()
        opgraft.graft(trained)
        trained(**inputs(name))

    return run


def _graft_gpt2(folder: Path) -> None:
    """Graft a model whose linear layers have their weights transposed."""
    import transformers

    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=99)
    model = transformers.GPT2LMHeadModel(config).eval()
    opgraft.graft(model)
    with torch.inference_mode():
        model(torch.tensor([[5, 7, 9]]))


def _llama(folder: Path) -> Any:
    """Return a Llama whose rows are whole groups of every format; its checkpoint is in the folder."""
    sizes = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    return written("Llama", folder, **sizes)


def _online(method: str) -> Scene:
    def run(folder: Path) -> None:
        _llama(folder)
        logits_of(folder, method)

    return run


def _checkpoint(form: str) -> Scene:
    def run(folder: Path) -> None:
        llama = _llama(folder / "plain")
        write(folder / "quantized", folder / "plain", llama, form)
        logits_of(folder / "quantized")

    return run


def _examples() -> None:
    """Call the example of its spec for each op that no scene has called."""
    for spec in SPECS.values():
        target: Any = host_state().registry.find_target(spec.functional.op)
        bases = (qualified(base) for base in target.__mro__)
        if spec.module is None or any(
            f"{base}.{FORWARD}" in counting_plugin.SHAPES for base in bases
        ):
            continue
        variant = next(iter(spec.variants))
        arguments = spec.arguments(variant, spec.dtypes[0], spec.leads[0], spec.sizes[0])
        with torch.inference_mode():
            checks.by_module(spec)(**arguments)
