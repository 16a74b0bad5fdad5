"""Levels: what each makes of a model, and the settings that it fills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig, CompilationMode, OpgraftConfig, set_config
from opgraft.compilation.passes import BUILT_IN
from opgraft.config import config_from_fields, read_file, resolve
from opgraft.errors import ConfigError
from support.blocks import WIDTH, Block
from torch import Tensor, fx, nn


def resolved(**fields: Any) -> CompilationConfig:
    layer = OpgraftConfig(compilation_config=CompilationConfig(**fields))
    return resolve([("there", layer)]).config.compilation_config


@pytest.mark.parametrize(
    ("level", "mode", "backend", "sizes"),
    [
        (0, CompilationMode.NONE, "inductor", ()),
        (1, CompilationMode.FULL, "eager", ()),
        (2, CompilationMode.FULL, "inductor", ()),
        (3, CompilationMode.FULL, "inductor", (1,)),
    ],
)
def test_a_level_fills_what_is_open(
    level: int, mode: CompilationMode, backend: str, sizes: tuple[int, ...]
) -> None:
    """A level sets mode, backend, custom ops and sizes; what another setting says stays, and its origin is told."""
    filled = resolved(level=level)
    assert (filled.mode, filled.backend, filled.compile_sizes) == (mode, backend, sizes)
    assert resolved(level=level, backend="aot_eager").backend == "aot_eager"
    assert resolved(level=level, mode=mode) == filled
    settings = resolve(
        [("there", OpgraftConfig(compilation_config=CompilationConfig(level=level)))]
    )
    assert (
        settings.origins["compilation_config.mode"] == f"compilation_config.level {level} (there)"
    )


@pytest.mark.parametrize(("level", "mode"), [(0, "FULL"), (2, "NONE"), (1, "STOCK_TORCH_COMPILE")])
def test_a_level_of_another_mode(level: int, mode: str) -> None:
    """A level that the mode leaves without effect is an error, which names both and who set them."""
    layers = [
        ("a file", OpgraftConfig(compilation_config=CompilationConfig(level=level))),
        ("an option", OpgraftConfig(compilation_config=CompilationConfig(mode=mode))),  # type: ignore[arg-type]
    ]
    expected = rf"level = {level} \(a file\), compilation_config\.mode = {mode} \(an option\)\. .* leave one of"
    with pytest.raises(ConfigError, match=expected):
        resolve(layers)


def test_linear_layers_keep_their_kernel_above_level_one() -> None:
    """Under inductor the native definitions are compiled, but for linear layers; a setting of custom_ops goes first."""
    for given, expected in (({}, [True, False]), ({"custom_ops": ["all"]}, [True, True])):
        layer = OpgraftConfig(compilation_config=CompilationConfig(level=2, **given))
        settings = resolve([("there", layer)])
        assert [settings.enabled(name)[0] for name in ("linear", "rms_norm")] == expected


def test_files_and_variables_have_the_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON, TOML and a variable give a level, beside passes that are switched off."""
    (tmp_path / "c.json").write_text(
        json.dumps({"compilation_config": {"level": 3, "pass_config": {"copies": False}}})
    )
    (tmp_path / "c.toml").write_text(
        "[compilation_config]\nlevel = 3\npass_config = { copies = false }\n"
    )
    for name in ("c.json", "c.toml"):
        found = resolve(read_file(str(tmp_path / name)).layers).config.compilation_config
        assert (found.mode, found.compile_sizes, found.pass_config) == (
            CompilationMode.FULL,
            (1,),
            {"copies": False},
        )
    monkeypatch.setenv("OPGRAFT_COMPILATION_CONFIG_LEVEL", "1")
    opgraft.reset()
    assert (
        opgraft.registry.state.host_state().settings().config.compilation_config.backend == "eager"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"level": 4}, r"compilation_config\.level is 4: use an integer at least 0 and at most 3"),
        ({"lvel": 2}, r"did you mean 'compilation_config\.level'"),
        ({"compile_sizes": [0]}, r"compile_sizes is \(0,\): use sizes of at least 1"),
        ({"compile_sizes": [1 << 31]}, "use sizes of at least 1, and below 2147483648"),
        ({"pass_config": {"copies": "no"}}, "use a mapping of strings to true or false"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    """A level out of range, an unknown field, a size of nothing and a flag that is none are errors."""
    with pytest.raises(ConfigError, match=message):
        config_from_fields({f"compilation_config.{name}": value for name, value in fields.items()})


def test_contradictions(block: Block, x: Tensor) -> None:
    """Settings of passes and sizes under a mode that has none are errors, and so are passes that there are not."""
    for mode in ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE"):
        config = CompilationConfig(mode=mode, pass_config={"copies": False})
        with pytest.raises(
            ConfigError, match=rf"pass_config is set, .*mode is {mode}: set it to FULL"
        ):
            opgraft.compile(block, config, args=(x,))
    with pytest.raises(ConfigError, match=r"graph_mode is full, and .*capture_sizes is empty"):
        opgraft.compile(
            block, CompilationConfig(level=1, graph_mode="full", capture_sizes=[]), args=(x,)
        )
    with pytest.raises(ConfigError, match="backend is '', which cannot be used here"):
        opgraft.compile(block, CompilationConfig(level=1, backend=""), args=(x,))
    for given in (
        {"level": 1},
        {"mode": "NONE"},
        {"mode": "STOCK_TORCH_COMPILE"},
        {"level": 2, "backend": "eager"},
    ):
        with pytest.raises(
            ConfigError,
            match=r"cache is set, and keeps code .* set the cache to false, or the others",
        ):
            opgraft.compile(block, CompilationConfig(cache=True, **given), args=(x,))  # type: ignore[arg-type]
    config = CompilationConfig(level=1, pass_config={"copys": False})
    with pytest.raises(ConfigError, match="pass_config has 'copys': did you mean 'copies'"):
        opgraft.compile(block, config, args=(x,))


def test_every_level_computes_what_the_model_does(
    block: Block, counting: list[fx.GraphModule]
) -> None:
    """Level 0 is the model; 1 and 2 are one graph for any size; 3 has another, which a batch of one alone runs."""
    x = torch.randn(3, 5, WIDTH)
    assert opgraft.compile(block, CompilationConfig(level=0), args=(x,)) is block
    assert opgraft.compile(block, CompilationConfig(level=1), args=(x,)).decision.chosen == "eager"
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(backend="counting"))):
        for level, graphs in ((2, 1), (3, 2)):
            counting.clear()
            compiled = opgraft.compile(block, CompilationConfig(level=level), args=(x,))
            assert len(counting) == graphs
            for size in (1, 2, 50):
                batch = torch.randn(size, 5, WIDTH)
                torch.testing.assert_close(compiled(batch), block(batch), rtol=1e-5, atol=1e-5)
            assert len(counting) == graphs
    (sized,) = compiled.sizes
    assert sized == 1
    (placeholder,) = (
        node for node in compiled.sizes[1].graph.graph.nodes if node.op == "placeholder"
    )
    assert placeholder.meta["val"].shape == (1, 5, WIDTH)


class ApartForOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 else x + 1


def test_a_size_has_code_of_its_own() -> None:
    """What a model does for a batch of one alone is in the code for that size, where level 3 asks for some."""
    model, x = ApartForOne().eval(), torch.randn(3, 2)
    compiled = opgraft.compile(model, CompilationConfig(level=3, backend="eager"), args=(x,))
    for size in (1, 2, 5):
        batch = torch.randn(size, 2)
        assert torch.equal(compiled(batch), model(batch)), size


def test_sizes_need_one_that_is_dynamic(x: Tensor, block: Block) -> None:
    """Without a dynamic size, or with two of them, compile_sizes say nothing of the graph: an error."""
    config = CompilationConfig(level=1, compile_sizes=[4])
    with pytest.raises(
        ConfigError, match=r"compile_sizes is set, and the graph has none for dynamic sizes"
    ):
        opgraft.compile(block, config, args=(x,), dynamic_shapes={"x": None})
    dims = {"x": {0: torch.export.Dim("a"), 1: torch.export.Dim("b")}}
    with pytest.raises(
        ConfigError, match=r"has s\w+, s\w+ for dynamic sizes, where one is expected"
    ):
        opgraft.compile(block, config, args=(x,), dynamic_shapes=dims)


def test_passes_are_switched(block: Block, x: Tensor) -> None:
    """A pass that is switched off does not run, and its nodes stay."""
    config = CompilationConfig(level=1, pass_config={"add_rms_norm": False})
    compiled = opgraft.compile(block, config, args=(x,))
    assert [report.name for report in compiled.passes] == [
        each.name for each in BUILT_IN if each.is_default and each.name != "add_rms_norm"
    ]
    torch.testing.assert_close(compiled(x), block(x), rtol=1e-5, atol=1e-5)


def test_packed_models_keep_their_kernel() -> None:
    """Of a packed model each linear layer is one node over the packed weight, whatever ops are enabled."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.RMSNorm(256), nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256, bias=False)
    ).eval()
    plain = [parameter.detach().clone().double() for parameter in model.parameters()]
    opgraft.graft(model)
    report = opgraft.freeze(model, keep_plain=False)
    if not report.packed:
        pytest.skip(f"nothing is packed here: {report}")
    compiled = opgraft.compile(
        model, CompilationConfig(level=1, custom_ops=["none"]), args=(torch.randn(3, 256),)
    )
    names = [str(node.target) for node in compiled.graph.graph.nodes]
    assert names.count("opgraft.packed_only_linear.default") == len(report.packed) == 2
    for size in (1, 5):
        x = torch.randn(size, 256)
        normed = nn.functional.rms_norm(x.double(), (256,), plain[0])
        expected = nn.functional.silu(normed @ plain[1].T + plain[2]) @ plain[3].T
        torch.testing.assert_close(compiled(x).double(), expected, rtol=1e-4, atol=1e-5)
    opgraft.thaw(model)
    with pytest.raises(opgraft.errors.PackError, match="packed weight that is gone"):
        compiled(torch.randn(2, 256))
