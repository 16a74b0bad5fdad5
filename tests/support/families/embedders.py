"""Vectors of ``LLM.embed`` beside transformers' own, for a tiny model of any architecture."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from opgraft import LLM
from support.families.registry import model_class
from support.families.shrink import VOCABULARY, WAYS, tiny
from support.families.sweep import MOST_PARAMETERS, NotRun
from support.small_tokenizers import trained_tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.auto import modeling_auto

LENGTHS = (5, 1, 12, 30, 2)
"""Tokens of the texts."""

WINDOW = 8

PROTEINS = {"pad_token_id": 1, "mask_token_id": 3}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "EsmModel": (
        PROTEINS,
        {**PROTEINS, "position_embedding_type": "rotary"},
        {**PROTEINS, "position_embedding_type": "rotary", "token_dropout": True},
    ),
    "EsmForMaskedLM": ({**PROTEINS, "position_embedding_type": "rotary", "token_dropout": True},),
    "Gemma3TextModel": ({}, {"use_bidirectional_attention": True}),
    "XmodModel": ({"default_language": "en_XX"},),
    "XmodForMaskedLM": ({"default_language": "en_XX"},),
}
"""Settings that a family needs, or that change how tokens come together; each is a model of its own."""

OTHER_MODALITIES = ("image_token_id", "video_token_id")
SPECIAL = ("cls_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "mask_token_id")


def cases() -> list[tuple[str, dict[str, Any]]]:
    """The architectures, each with settings beside those of its tiny model."""
    return [(name, options) for name in architectures() for options in OPTIONS.get(name, ({},))]


def architectures() -> list[str]:
    """The base models of transformers, and those with a head that guesses words: what ``LLM`` may take to embed."""
    registries = (
        modeling_auto.MODEL_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    names = [name for registry in registries for name in registry.values()]
    listed = [each for name in names for each in ([name] if isinstance(name, str) else name)]
    return sorted(set(listed))


def texts(config: Any) -> list[list[int]]:
    """Token ids of each text; one of them has the special tokens of a model."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.randint(5, VOCABULARY // 2, (length,), generator=generator).tolist()
        for length in LENGTHS
    ]
    # The place of a picture or a video is no text.
    others = {getattr(config, name, None) for name in OTHER_MODALITIES}
    found = [getattr(config.get_text_config(), name, None) for name in SPECIAL]
    special = [
        each
        for each in found
        if isinstance(each, int) and 0 <= each < VOCABULARY and each not in others
    ]
    rows[2][1 : 1 + len(special)] = special
    return rows


def build(name: str, options: dict[str, Any]) -> tuple[nn.Module, list[list[int]], Tensor]:
    """A tiny model that takes texts, the texts, and the vectors that transformers gives for each alone.

    Raises:
        NotRun: it cannot be built, or takes no texts.
    """
    try:
        forward = model_class(name).forward
    except (ImportError, AttributeError) as error:
        raise NotRun(f"{type(error).__name__}: {str(error).strip():.150}") from error
    if "input_ids" not in inspect.signature(forward).parameters:
        raise NotRun("its forward takes no token ids")
    reasons = []
    for way in WAYS:
        try:
            model = _model(name, way, options)
            rows = texts(model.config)
            return model, rows, torch.stack([vector(model, each) for each in rows])
        except Exception as error:  # whatever a model raises whose sizes do not fit
            reasons.append(f"{type(error).__name__}: {str(error)[:150]}")
    raise NotRun(reasons[0])


def _model(name: str, way: Any, options: dict[str, Any]) -> nn.Module:
    cls = model_class(name)
    config = _narrow(tiny(cls.config_class, way))
    config.update(options)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise NotRun(f"{size:,} parameters after shrinking")
    torch.manual_seed(0)
    model = cls(config).float().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.1)  # positions and norms that do something
    return model


def _narrow(config: Any) -> Any:
    """Make the windows of a configuration narrower than the texts are long."""
    text = config.get_text_config()
    for name in ("sliding_window", "local_attention"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, WINDOW)
    return config


def vector(model: Any, ids: list[int]) -> Tensor:
    """The mean of the last hidden states of one text, of unit length."""
    with torch.no_grad():
        states = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    if states.dim() != 2 or not states.isfinite().all():
        raise NotRun(f"its hidden states have the shape {tuple(states.shape)}, or are no numbers")
    return functional.normalize(states.mean(0), dim=0)


def save(model: Any, folder: Path) -> None:
    """Write the model with a tokenizer."""
    model.save_pretrained(folder)
    trained_tokenizer().save(str(folder / "tokenizer.json"))


def opened(folder: Path) -> LLM:
    """The model that is saved in a folder."""
    return LLM(str(folder), dtype="float32", **{"load.progress": False})


def embedded(llm: LLM, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The vectors of the texts one by one, and those in one call."""
    alone = [llm.embed([ids])[0].embedding for ids in rows]
    batch = [output.embedding for output in llm.embed(rows)]
    return torch.tensor(alone), torch.tensor(batch)
