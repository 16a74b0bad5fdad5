"""An op behaves like any module: identity, copies, pickles, torch's transformations, memory."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
import sys
import threading
import weakref
from multiprocessing import spawn
from pathlib import Path

import opgraft
import pytest
import torch
from opgraft import (
    CompilationConfig,
    CustomOp,
    OpgraftConfig,
    PluggableLayer,
    inference_only,
    maybe_get_oot_by_class,
    set_config,
)
from opgraft.errors import RegistrationError
from torch import nn
from torch.nn.utils import parametrize


def pickled(op):
    """What comes out of a pickle."""
    return pickle.loads(pickle.dumps(op))  # noqa: S301  # made by the test itself


def run_in_child(blob: bytes, pipe) -> None:
    """Load a pickled op in a fresh process and send back what it computes."""
    op = pickle.loads(blob)  # noqa: S301  # made by the test itself
    pipe.send((op.op_class.__name__, op(torch.ones(4)).tolist(), str(op.decision.chosen)))


@pytest.fixture
def op(scale, fast_scale):
    """An op whose class is a replacement."""
    scale.register_oot(fast_scale)
    return scale(4, factor=3.0)


def test_a_replaced_op_is_an_instance_of_both_classes(op, scale, fast_scale) -> None:
    """isinstance holds for the target, op_class gives the exact class, and names are the replacement's own."""
    assert isinstance(op, scale)
    assert isinstance(op, fast_scale)
    assert op.op_class is fast_scale
    assert type(op).__name__ == fast_scale.__name__
    assert repr(op) == "FastScale()"
    assert op.factor == 3.0


def test_a_subclass_of_a_replaced_class_is_its_own_target(scale, fast_scale) -> None:
    """Replacing a class leaves classes derived from it alone."""

    class Derived(scale):
        pass

    scale.register_oot(fast_scale)
    assert Derived().op_class is Derived
    assert maybe_get_oot_by_class(Derived) is Derived
    assert Derived().decision.subject == f"{Derived.__qualname__}, a variant of op scale"


def test_one_specialisation_serves_all_instances(scale) -> None:
    """Instances with the same class and kernel share one type, which keeps compiled code and caches valid."""
    assert type(scale()) is type(scale())


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickled])
def test_copies_compute_with_their_own_weights(op, copier) -> None:
    """A shallow copy, a deep copy and a pickle are ops of the same class with the same kernel."""
    twin = copier(op)
    assert twin.op_class is op.op_class
    assert twin.decision.chosen == op.decision.chosen
    twin._parameters = {
        "weight": nn.Parameter(torch.full((4,), 7.0))
    }  # a shallow copy of a module shares this dict
    torch.testing.assert_close(twin(torch.ones(4)), torch.full((4,), 7.0))
    torch.testing.assert_close(op(torch.ones(4)), torch.full((4,), 3.0))


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_made_after_a_registration_stays_what_it_was(scale, fast_scale, copier) -> None:
    """A replacement whose constructor never ran must not come out of a copy."""
    plain = scale()
    scale.register_oot(fast_scale)
    assert copier(plain).op_class is scale


def test_a_deep_copy_keeps_the_kernel_of_the_scope_it_was_bound_in(scale) -> None:
    """Copying outside of a set_config scope does not re-decide."""
    with set_config(OpgraftConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        disabled = scale()
    assert copy.deepcopy(disabled).decision.chosen == "Scale.forward_native"
    assert (
        copy.deepcopy(scale(enforce_enable=True)).decision.reason
        == scale(enforce_enable=True).decision.reason
    )


def test_torch_save_and_state_dict_round_trip(op, scale) -> None:
    """A whole model can be saved, and its state_dict has the keys of a plain module."""
    model = nn.Sequential(op)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert list(model.state_dict()) == ["0.weight"]
    torch.testing.assert_close(loaded(torch.ones(4)), model(torch.ones(4)))
    fresh = nn.Sequential(scale())
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(torch.ones(4)), torch.full((4,), 3.0))


def test_an_op_travels_to_a_spawned_process(op, monkeypatch, warm_python: str) -> None:
    """A worker that unpickles an op gets one that is bound in the worker."""
    monkeypatch.setattr(
        sys, "path", [*sys.path, str(Path(__file__).parents[2])]
    )  # the child imports this very file
    context = multiprocessing.get_context("spawn")
    interpreter = spawn.get_executable()
    context.set_executable(warm_python)
    here, there = context.Pipe()
    process = context.Process(target=run_in_child, args=(pickle.dumps(op), there))
    process.start()
    context.set_executable(interpreter)
    assert here.poll(60)
    assert here.recv() == ("FastScale", [3.0] * 4, "FastScale.forward_oot")
    process.join()


def test_an_op_is_freed_with_its_last_reference(op) -> None:
    """No reference cycle keeps the weights until the garbage collector runs."""
    own = maybe_get_oot_by_class(CustomOp.op_registry["scale"])()
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(own.weight), weakref.ref(own)
        del own
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()


def test_hooks_fire_once_and_see_the_output(op) -> None:
    """Forward hooks work as on any module."""
    seen = []
    op.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    op.register_forward_hook(lambda module, args, out: seen.append(out.sum().item()))
    op(torch.ones(4))
    assert seen == ["pre", 12.0]


def test_to_moves_and_casts(op) -> None:
    """.to() casts the weight and the op computes in the new dtype."""
    assert op.to(torch.float64)(torch.ones(4, dtype=torch.float64)).dtype == torch.float64


def test_export_and_functional_call(op) -> None:
    """torch.export traces through the bound kernel, and functional_call substitutes parameters."""
    x = torch.randn(3, 4)
    exported = torch.export.export(op, (x,)).module()
    torch.testing.assert_close(exported(x), op(x))
    replaced = torch.func.functional_call(op, {"weight": torch.zeros(4)}, (x,))
    assert replaced.abs().sum() == 0


def test_data_parallel_replicas_use_their_own_weights(op) -> None:
    """A replica is made by torch without the constructor and must not fall back to the original's weights."""
    replica = op._replicate_for_data_parallel()
    assert replica.op_class is op.op_class
    replica.weight = torch.full((4,), 5.0)
    torch.testing.assert_close(replica(torch.ones(4)), torch.full((4,), 5.0))


def test_parametrized_ops_keep_working(op) -> None:
    """torch derives a class from the specialisation; calls, copies and removal still work."""
    parametrize.register_parametrization(op, "weight", nn.Identity())
    torch.testing.assert_close(op(torch.ones(4)), torch.full((4,), 3.0))
    torch.testing.assert_close(copy.deepcopy(op)(torch.ones(4)), torch.full((4,), 3.0))
    parametrize.remove_parametrizations(op, "weight")
    torch.testing.assert_close(op(torch.ones(4)), torch.full((4,), 3.0))


def test_compiled_ops_follow_the_binding(scale, fast_scale) -> None:
    """A compiled op has no graph break, and one that is bound otherwise is not served by stale code."""
    x = torch.randn(3, 4)
    compiled = torch.compile(scale(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x * 2)

    @scale.register_oot
    class Negated(scale):
        def forward_oot(self, x, bias=None):
            return -super().forward_oot(x, bias)

    torch.testing.assert_close(torch.compile(scale(), backend="eager", fullgraph=True)(x), x * -2)


def test_ops_can_be_constructed_from_many_threads(scale, fast_scale) -> None:
    """The lazy loading of plugins and the cache of bindings are safe when threads race for them."""
    scale.register_oot(fast_scale)
    found, barrier = [], threading.Barrier(8)

    def construct() -> None:
        barrier.wait()
        found.append(scale().op_class)

    threads = [threading.Thread(target=construct) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [fast_scale] * 8


class TestGradients:
    """Where a gradient is required the kernel must have a backward, or the native definition runs."""

    @pytest.fixture
    def guarded(self, scale):
        class Fused(scale):
            @inference_only
            def forward_oot(self, x, bias=None):
                return torch.mul(x, self.weight.detach()).detach()

        scale.register_oot(Fused)
        return scale()

    def test_an_inference_only_kernel_runs_where_no_gradient_is_required(self, guarded) -> None:
        """Under no_grad the marked kernel runs."""
        with torch.no_grad():
            assert guarded(torch.ones(4)).grad_fn is None

    @pytest.mark.parametrize("source", ["input", "weight", "keyword"])
    def test_the_native_definition_runs_where_one_is(self, guarded, source: str) -> None:
        """A gradient required by an input, by a keyword argument or by the weight reaches the native definition."""
        guarded.requires_grad_(source == "weight")
        x, bias = (
            torch.ones(4, requires_grad=source == "input"),
            torch.ones(4, requires_grad=source == "keyword"),
        )
        guarded(x, bias=bias).sum().backward()
        wanted = {"input": x, "weight": guarded.weight, "keyword": bias}[source]
        torch.testing.assert_close(wanted.grad, torch.full((4,), {"input": 2.0}.get(source, 1.0)))

    def test_a_guarded_kernel_steps_aside_however_it_is_reached(self, scale) -> None:
        """A kernel without a backward that super().forward_oot() reaches is guarded too."""

        class Base(scale):
            @inference_only
            def forward_cpu(self, x, bias=None):
                return torch.mul(x, self.weight.detach()).detach()

        class Wrapped(Base):
            def forward_oot(self, x, bias=None):
                return super().forward_oot(x, bias) + 0

        Base.register_oot(Wrapped)
        x = torch.ones(4, requires_grad=True)
        Base()(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((4,), 2.0))

    def test_tensors_inside_containers_count(self) -> None:
        """A gradient required by a tensor in a list or dictionary is seen."""

        class Sum(CustomOp):
            def forward_native(self, values):
                return values["all"][0] * 2

            @inference_only
            def forward_cpu(self, values):
                return (values["all"][0] * 2).detach()

        x = torch.ones(1, requires_grad=True)
        assert Sum()({"all": [x]}).requires_grad

    def test_a_layers_forward_stands_in_for_a_native_definition(self) -> None:
        """For a layer, what runs where a gradient is required is its own forward."""

        class Layer(PluggableLayer):
            def forward(self, x):
                return x * 3

        @Layer.register_oot
        class Fast(Layer):
            @inference_only
            def forward_oot(self, x):
                return (x * 3).detach()

        x = torch.ones(1, requires_grad=True)
        assert Layer()(x).requires_grad
        with torch.no_grad():
            assert Layer()(x).item() == 3

    def test_static_methods_are_rejected(self, scale) -> None:
        """A static kernel does not know its op, so the mark is an error in either order."""
        with pytest.raises(RegistrationError, match="takes self"):
            inference_only(staticmethod(lambda x, bias=None: x))
        scale.register_oot(
            type(
                "S", (scale,), {"forward_oot": staticmethod(inference_only(lambda x, bias=None: x))}
            )
        )
        with pytest.raises(RegistrationError, match="inference_only and static"):
            scale()

    def test_the_decision_says_where_the_kernel_steps_aside(self, guarded) -> None:
        """That another definition runs under autograd is no secret."""
        assert "forward_native runs where a gradient is required" in str(guarded.decision)

    def test_the_guard_compiles(self, guarded) -> None:
        """Choosing between kernel and native definition does not break the graph."""
        x = torch.ones(4, requires_grad=True)
        torch.compile(guarded, backend="eager", fullgraph=True)(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((4,), 2.0))


def test_the_decision_tells_the_whole_story(op) -> None:
    """op.decision names the kernel, the class, the platform, providers, places and settings, as text and as data."""
    text = str(op.decision)
    for word in (
        "FastScale.forward_oot",
        "Scale.forward_cpu",
        "scale.py:",
        "platform: cpu",
        "OPGRAFT_CUSTOM_OPS",
    ):
        assert word in text
    data = op.decision.to_dict()
    assert data["subject"] == "op scale"
    assert [part["subject"] for part in data["parts"]] == ["class of Scale", "plugins", "platform"]


def test_the_binding_is_public_and_read_only(op) -> None:
    """op.binding has the class and the kernel that were chosen; what an op runs is changed by rebind alone."""
    assert str(op.binding.kernel.winner) == "FastScale.forward_oot"
    assert op.binding.replacement.cls is op.op_class
    with pytest.raises(AttributeError, match="binding"):
        op.binding = None


def test_existing_ops_survive_reset(op) -> None:
    """reset changes what is constructed next, not what exists."""
    opgraft.reset()
    torch.testing.assert_close(op(torch.ones(4)), torch.full((4,), 3.0))
    assert "FastScale.forward_oot" in str(op.decision)


def test_an_unpickled_op_knows_what_it_replaces(op, scale) -> None:
    """The decision of an op that came out of a pickle names its provider, and rebind can take it back."""
    loaded = nn.Sequential(pickled(op))
    assert "class of Scale: FastScale (provided by" in str(loaded[0].decision)
    CustomOp.unregister_oot(op.op_class)
    opgraft.rebind(loaded)
    assert loaded[0].op_class is scale


def test_authors_subclass_hooks_are_named_when_they_refuse(scale) -> None:
    """A class whose __init_subclass__ needs an argument cannot be bound; the error names it and the way out."""

    class Picky(scale):
        def __init_subclass__(cls, *, label, **kwargs):
            super().__init_subclass__(**kwargs)

    with pytest.raises(RegistrationError, match=r"Picky at .*cannot be subclassed.*defaults"):
        Picky()
