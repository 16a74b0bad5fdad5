"""Inputs for a model of transformers, from the names that its forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from support.families.shrink import VOCABULARY
from torch import Tensor, nn

TOKENS = 8
_IMAGES = (64, 32, 128, 224)


def candidates(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Arguments for the model's forward, the likeliest first; one of them may run."""
    accepted = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    names = [name for name in (main, "input_ids", *_MAKERS) if name in accepted]
    for name in dict.fromkeys(names):
        for value in _MAKERS.get(name, _nothing)(model):
            base = {**_required(model, name), name: value, **_decoder(model, accepted, name)}
            yield base
            if "input_ids" in accepted and name != "input_ids":
                yield {**base, "input_ids": tokens()}


def _required(model: nn.Module, main: str) -> dict[str, Any]:
    """What else a forward asks for without a default."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name != main
    ]
    found = {name: next(iter(_MAKERS[name](model)), None) for name in names if name in _MAKERS}
    if "bbox" in inspect.signature(model.forward).parameters:
        found["bbox"] = tokens()[..., None].expand(-1, -1, 4).clone()
    return found


def tokens(rows: int = 2, length: int = TOKENS) -> Tensor:
    return torch.randint(5, VOCABULARY // 2, (rows, length), generator=_generator())


def _decoder(model: Any, accepted: set[str], main: str) -> dict[str, Tensor]:
    if "decoder_input_ids" in accepted and main != "decoder_input_ids":
        return {"decoder_input_ids": tokens(length=TOKENS - 2)}
    return {}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator())


def _tokens(model: nn.Module) -> Iterator[Tensor]:
    yield tokens()
    yield tokens(length=64)


def _images(model: Any) -> Iterator[Tensor]:
    sizes = [*_found(model.config, "image_size"), *_IMAGES]
    sizes.sort(
        key=lambda size: isinstance(size, int) and size > max(_IMAGES)
    )  # large ones last, as they take long
    for channels in dict.fromkeys(
        [*_found(model.config, "num_channels"), *_found(model.config, "in_channels"), 3]
    ):
        for size in dict.fromkeys(sizes):
            yield _random(2, channels, *((size, size) if isinstance(size, int) else size))


def _videos(model: Any) -> Iterator[Tensor]:
    frames = next(iter(_found(model.config, "num_frames")), 4)
    for image in _images(model):
        yield image[:, None].expand(-1, frames, -1, -1, -1).clone()


def _images_or_videos(model: Any) -> Iterator[Tensor]:
    yield from _images(model)
    yield from _videos(model)
    yield from (image[:1, None] for image in _images(model))


def _features(model: Any) -> Iterator[Tensor]:
    wanted = (
        "num_mel_bins",
        "input_feat_per_channel",
        "feature_size",
        "n_mels",
        "input_dim",
        "input_size",
        "num_mels",
    )
    sizes = [
        size for name in wanted for size in _found(model.config, name) if isinstance(size, int)
    ]
    length = next((2 * n for n in _found(model.config, "max_source_positions")), 128)
    for size in dict.fromkeys([*sizes, 80, 128]):
        for steps in dict.fromkeys((128, length, 3000)):
            yield _random(2, size, steps)
            yield _random(2, steps, size)
            yield _random(2, 1, steps, size)


def _waves(model: Any) -> Iterator[Tensor]:
    yield _random(2, 4000)
    yield _random(2, 1, 4000)
    yield _random(2, 1, 48000)
    yield from _features(model)


def _embeddings(model: Any) -> Iterator[Tensor]:
    for size in dict.fromkeys(
        [*_found(model.config, "hidden_size"), *_found(model.config, "d_model")]
    ):
        yield _random(2, TOKENS, size)


def _past(model: Any) -> Iterator[Tensor]:
    for length in dict.fromkeys([*_found(model.config, "context_length"), 64]):
        for channels in dict.fromkeys([*_found(model.config, "num_input_channels"), 1]):
            yield _random(2, length, channels)
        yield _random(2, length)


def _nothing(model: Any) -> Iterator[Any]:
    yield from ()


_MAKERS: dict[str, Any] = {
    "input_ids": _tokens,
    "pixel_values": _images_or_videos,
    "pixel_values_videos": _videos,
    "input_features": _features,
    "input_values": _waves,
    "audio_values": _waves,
    "past_values": _past,
    "inputs_embeds": _embeddings,
    "hidden_states": _embeddings,
    "spectrogram": _features,
}


def _found(config: Any, name: str) -> list[Any]:
    """Values of a setting anywhere in a configuration."""
    own = [vars(config)[name]] if vars(config).get(name) is not None else []
    inner = [value for value in vars(config).values() if hasattr(value, "model_type")]
    return own + [found for value in inner for found in _found(value, name)]
