"""A plugin that is a distribution of its own replaces layers, a weight method and the communicator."""

from __future__ import annotations

import json
from collections.abc import Sequence

import opgraft
import pytest
import torch
from conftest import Cli, Site
from opgraft import distributed, ops
from opgraft.distributed.communicator import Communicator
from opgraft.errors import ConflictError, RegistrationError
from opgraft.ops.linear.methods import UnquantizedLinearMethod
from opgraft.ops.moe.fused.modular import MoEPrepare
from support.ranks import Ranks
from torch.nn import functional as F

PLUGIN = """
import opgraft
from opgraft.distributed.communicator import Communicator
from opgraft.ops import PluggableLayer, RowParallelLinear, VocabParallelEmbedding
from opgraft.ops.linear.methods import UnquantizedLinearMethod

platforms = "any"
CALLS = []

@PluggableLayer.register_oot("RowParallelLinear")
class VendorRow(RowParallelLinear):
    def forward(self, input_):
        CALLS.append("row")
        return super().forward(input_)

@VocabParallelEmbedding.register_oot
class VendorEmbedding(VocabParallelEmbedding):
    def forward(self, input_):
        CALLS.append("embedding")
        return super().forward(input_)

@opgraft.PluggableClass.register_oot("unquantized_linear_method")
class VendorMethod(UnquantizedLinearMethod):
    def apply(self, layer, x, bias=None, **after):
        CALLS.append("method")
        return super().apply(layer, x, bias, **after)

@opgraft.PluggableClass.register_oot("communicator")
class VendorCommunicator(Communicator):
    def all_reduce(self, x):
        CALLS.append("all_reduce")
        return super().all_reduce(x)
"""
CLASSES = ["VendorCommunicator", "VendorEmbedding", "VendorMethod", "VendorRow"]


@pytest.fixture
def vendor(site: Site) -> Site:
    """The plugin as pip leaves it."""
    site.plugin("vendor-layers", PLUGIN)
    return site


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def run_layers() -> tuple[torch.Tensor, Sequence[str], Sequence[str]]:
    import vendor_layers

    embedding = ops.VocabParallelEmbedding(128, 16)
    row = ops.RowParallelLinear(16, 8, bias=False, input_is_parallel=False, return_bias=False)
    for layer, weight in ((embedding, drawn(128, 16)), (row, drawn(8, 16))):
        layer.weight.weight_loader(layer.weight, weight)
    vendor_layers.CALLS.clear()
    result = row(embedding(torch.arange(0, 128, 5)))
    communicator = distributed.get_tp_group().communicator
    made = (row.op_class, embedding.op_class, type(row.quant_method), type(communicator))
    return result, list(vendor_layers.CALLS), sorted(cls.__qualname__ for cls in made)


def test_a_distribution_replaces_layers_method_and_communicator(vendor: Site) -> None:
    """On two ranks, what the plugin brings is made and called, and the result is that of whole layers."""
    expected = F.linear(F.embedding(torch.arange(0, 128, 5), drawn(128, 16)), drawn(8, 16))
    with Ranks(2, path=[str(vendor.folder)], plugins="vendor_layers") as ranks:
        for result, calls, classes in ranks.run(run_layers):
            torch.testing.assert_close(result, expected)
            assert calls == ["embedding", "all_reduce", "row", "method", "all_reduce"]
            assert classes == CLASSES


@pytest.mark.parametrize("name", ["communicator", "Communicator", "VendorCommunicator"])
def test_explain_tells_which_class_whose_and_why(vendor: Site, cli: Cli, name: str) -> None:
    """A class that is no op is explained under each of its names: winner, provider, line and setting."""
    done = cli("ops", "explain", name, "--json", OPGRAFT_PLUGINS="vendor_layers")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["op"], told["target"]) == ("communicator", "Communicator")
    assert told["decision"]["chosen"] == "VendorCommunicator"
    winner = next(row for row in told["decision"]["candidates"] if row["accepted"])
    assert winner["provider"]["name"] == "vendor-layers"
    assert "vendor_layers.py:" in winner["location"]
    assert "communicator" in told["decision"]["setting"]


def test_explain_without_plugins(cli: Cli) -> None:
    """The host's own class is made where nobody replaces it."""
    done = cli("ops", "explain", "unquantized_linear_method")
    assert done.returncode == 0, done.stderr
    assert "UnquantizedLinearMethod" in done.stdout
    assert "no active replacement applies" in done.stdout


def test_the_doctor_finds_nothing_wrong(vendor: Site, cli: Cli) -> None:
    """Replacements of classes that are no ops are as healthy as those of ops."""
    done = cli("plugins", "doctor", OPGRAFT_PLUGINS="vendor_layers")
    assert done.returncode == 0, done.stdout + done.stderr


RIVAL = """
import opgraft
from opgraft.distributed.communicator import Communicator
platforms = "any"

@opgraft.PluggableClass.register_oot("communicator")
class Rival(Communicator):
    def all_gather(self, x, dim=-1):
        return super().all_gather(x, dim)
"""


def test_the_doctor_reports_rivals(vendor: Site, cli: Cli) -> None:
    """Two communicators of equal priority are a finding that names both and the setting that chooses."""
    vendor.plugin("rival-layers", RIVAL)
    done = cli("plugins", "doctor", OPGRAFT_PLUGINS="vendor_layers,rival_layers")
    assert done.returncode != 0
    told = " ".join(done.stdout.split())
    assert "Rival" in told
    assert "VendorCommunicator" in told
    assert "providers={'communicator'" in told


def test_the_doctor_reports_what_is_never_used(vendor: Site, cli: Cli) -> None:
    """A communicator of lower priority than another is never used, which the doctor says."""
    vendor.plugin("rival-layers", RIVAL.replace('"communicator")', '"communicator", priority=1)'))
    done = cli("plugins", "doctor", OPGRAFT_PLUGINS="vendor_layers,rival_layers")
    assert "VendorCommunicator" in done.stdout
    assert "never used" in " ".join(done.stdout.split())


def test_a_narrower_method_is_refused() -> None:
    """A replacement has to accept each call of the methods of its target."""
    with pytest.raises(
        RegistrationError,
        match=r"Narrow\.all_gather at .* is narrower than Communicator\.all_gather",
    ):

        @Communicator.register_oot
        class Narrow(Communicator):
            def all_gather(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return x


def test_a_class_that_overrides_nothing_is_refused() -> None:
    """The error names the methods that could be meant."""
    with pytest.raises(
        RegistrationError, match="Define one of all_gather, all_gather_object, all_reduce"
    ):

        @Communicator.register_oot
        class Empty(Communicator):
            pass


def test_a_class_that_is_called_names_its_call() -> None:
    """The error names ``__call__`` for a class that has no other method, and a narrower one of a replacement."""
    with pytest.raises(RegistrationError, match=r"Define one of __call__; a mixin"):

        @MoEPrepare.register_oot
        class Empty(MoEPrepare):
            pass

    with pytest.raises(
        RegistrationError, match=r"Narrow\.__call__ at .* is narrower than MoEPrepare\.__call__"
    ):

        @MoEPrepare.register_oot
        class Narrow(MoEPrepare):
            def __call__(self, x: torch.Tensor) -> None:  # type: ignore[override]
                return None


def test_a_class_without_methods_names_its_constructor() -> None:
    """A replacement of a class that nobody calls can only be constructed in another way."""

    @opgraft.PluggableClass.register("bare")
    class Bare(opgraft.PluggableClass):
        pass

    with pytest.raises(RegistrationError, match=r"Define __init__; a mixin"):

        @Bare.register_oot
        class Empty(Bare):
            pass


def test_a_name_of_two_kinds_is_refused() -> None:
    """Ops and other classes share one space of names."""
    with pytest.raises(ConflictError, match="'rms_norm' is registered twice"):
        opgraft.PluggableClass.register("rms_norm")(type("Other", (opgraft.PluggableClass,), {}))


def test_settings_choose_between_classes() -> None:
    """``providers`` chooses for a class that is no op as it does for ops."""

    @UnquantizedLinearMethod.register_oot
    class Other(UnquantizedLinearMethod):
        def apply(self, layer, x, bias=None, **after):  # type: ignore[no-untyped-def]
            return super().apply(layer, x, bias, **after)

    assert type(ops.ReplicatedLinear(2, 2).quant_method) is Other
    with opgraft.set_config(
        opgraft.OpgraftConfig(providers={"unquantized_linear_method": "opgraft"})
    ):
        assert type(ops.ReplicatedLinear(2, 2).quant_method) is UnquantizedLinearMethod
