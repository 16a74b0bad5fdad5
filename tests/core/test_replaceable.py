"""Free functions as ops: replaced by name, seen by whoever has imported them, explained and switched like every op."""

from __future__ import annotations

import pickle
from types import ModuleType

import opgraft
import pytest
import torch
from opgraft import OpgraftConfig, set_config
from opgraft.errors import ConflictError, RegistrationError, UnknownTargetError

APP = """
import opgraft
import torch
@opgraft.replaceable
def soften(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    "Softplus of x."
    return torch.nn.functional.softplus(x * by)
"""
USER = "from app import soften\ndef use(x):\n    return soften(x, by=2.0)\n"
PLUGIN = """
import opgraft
platforms = "any"
@opgraft.hookimpl
def opgraft_register_ops():
    @opgraft.replaces({target}{options})
    def quick(x, by=1.0):
        return {body}
"""


@pytest.fixture
def app(site) -> ModuleType:
    """An application with a replaceable function."""
    (site.folder / "app.py").write_text(APP)
    (site.folder / "user.py").write_text(USER)
    import user  # type: ignore[import-not-found]

    return user


def plugin(
    site, target: str = "'soften'", options: str = "", body: str = "x + by", name: str = "acme"
) -> None:
    site.plugin(name, PLUGIN.format(target=target, options=options, body=body))
    opgraft.reset()  # which has the scan of what is installed be made again


@pytest.mark.parametrize("target", ["'soften'", "'app:soften'", "__import__('app').soften"])
def test_a_binding_made_before_sees_the_replacement(site, app, target: str) -> None:
    """``from app import soften`` is the reference: it runs the plugin's function, and the native one where chosen."""
    plugin(site, target)
    x = torch.randn(5)
    torch.testing.assert_close(app.use(x), x + 2)
    native = torch.nn.functional.softplus(x.double() * 2)
    with set_config(OpgraftConfig(providers="soften=native")):
        torch.testing.assert_close(app.use(x).double(), native)
    with set_config(OpgraftConfig(plugins=[])):
        opgraft.reset()
        torch.testing.assert_close(app.use(x).double(), native)


def test_the_plugin_may_come_first(site) -> None:
    """A target by module is imported by the plugin; the application that imports it later has the same reference."""
    (site.folder / "app.py").write_text(APP)
    (site.folder / "user.py").write_text(USER)
    plugin(site, "'app:soften'")
    opgraft.load_plugins()
    import user

    torch.testing.assert_close(user.use(torch.zeros(2)), torch.full((2,), 2.0))


def test_compiled_code_has_the_function_in_its_graph(site, app) -> None:
    """A caller is one graph, before and after the choice changes."""
    plugin(site, options=", supports=lambda x, by=1.0: x.shape[0] % 2 == 0")
    compiled = torch.compile(app.use, fullgraph=True, backend="eager", dynamic=False)
    for size in (4, 5):
        x = torch.randn(size)
        expected = x + 2 if size == 4 else torch.nn.functional.softplus(x * 2)
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(app.use(x), expected)


def test_it_is_explained_like_every_op(cli, site) -> None:
    """``ops list`` has its row, ``ops explain`` the places of both functions and the setting."""
    (site.folder / "app.py").write_text(APP)
    plugin(site, "'app:soften'")
    text = cli("ops", "explain", "soften").stdout
    assert "op soften: " in text
    assert "quick.forward_oot at " in text
    assert f"{site.folder}/acme.py:7" in text
    assert f"{site.folder}/app.py:5" in text
    assert "OPGRAFT_PROVIDERS=soften=app" in text
    row = next(
        line for line in cli("ops", "list").stdout.splitlines() if line.startswith("soften ")
    )
    assert row.split()[-1] == "acme"


def test_an_exception_and_a_range_name_it(site, app) -> None:
    """What raises is traced to the plugin's function; ranges of the profiler name it."""
    plugin(site, body="x.nothing")
    with pytest.raises(AttributeError) as caught:
        app.use(torch.zeros(2))
    told = opgraft.explain_exception(caught.value)
    assert told is not None
    assert (told.op, str(told.provider)) == ("soften", "acme 1.0")
    assert told.location.endswith("acme.py:8")
    with (
        torch.profiler.profile() as watched,
        opgraft.profile(),
        set_config(OpgraftConfig(providers="soften=native")),
    ):
        app.use(torch.zeros(2))
    assert any(
        event.key.startswith("opgraft.soften soften.forward_native [app")
        for event in watched.key_averages()
    )


def test_it_stays_what_a_function_is(app) -> None:
    """Name, documentation and module are the function's, and it is pickled by reference."""
    soften = app.soften
    assert (soften.__name__, soften.__doc__, soften.__module__) == (
        "soften",
        "Softplus of x.",
        "app",
    )
    assert pickle.loads(pickle.dumps(soften)) is soften  # noqa: S301 - made here


def test_two_replacements_need_a_choice(site, app) -> None:
    """At equal priority a call is the conflict that constructing an op would be; ``providers`` settles it."""
    plugin(site)
    plugin(site, body="x - by", name="brix")
    with pytest.raises(
        ConflictError, match=r"quick at .*acme\.py:7 .* and .*quick at .*brix\.py:7"
    ):
        app.use(torch.zeros(2))
    with set_config(OpgraftConfig(providers="soften=brix")):
        torch.testing.assert_close(app.use(torch.zeros(2)), torch.full((2,), -2.0))


def untyped(x, y: int) -> int:
    return y


def without_result(x: int):
    return x


def whole(x: int, *, y: int = 1) -> int:
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            untyped,
            r"test_replaceable.py:\d+ is replaceable and its parameter 'x' has no annotation",
        ),
        (without_result, "its result has no annotation"),
        (print, "decorates a function, not <built-in"),
    ],
)
def test_a_function_without_types_is_refused(function, message: str) -> None:
    """Replacements are written against a signature, so there must be one."""
    with pytest.raises(RegistrationError, match=message):
        opgraft.replaceable(function)


def test_a_replacement_must_take_every_call() -> None:
    """One that lacks a parameter is refused when it is declared."""
    reference = opgraft.replaceable(whole)
    with pytest.raises(RegistrationError, match="the call"):
        opgraft.replaces(reference)(lambda x: x)


def test_a_name_that_nothing_replaceable_has(app) -> None:
    """An op that is no function, a misspelt name and a plain function of a module are told apart from it."""
    for name in ("rms_norm", "softenn", "app:torch"):
        with pytest.raises(UnknownTargetError, match="nothing replaceable is called"):
            opgraft.replaces(name)
    with pytest.raises(UnknownTargetError, match="did you mean 'soften'"):
        opgraft.replaces("softenn")
