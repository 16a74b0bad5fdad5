"""The rules of this code base that its syntax trees can tell."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import legibility
import pytest
from opgraft import errors
from opgraft.platform import DISPATCH_KEYS
from support.source_trees import (
    MODULES,
    OURS,
    REPOSITORY,
    SHIPPED,
    docstrings,
    dotted,
    functions,
    identifiers,
    texts,
    tree_of,
)

pytestmark = pytest.mark.source

FLOORS = [
    # Plain data: no torch, no state.
    "opgraft.base",
    "opgraft.errors",
    "opgraft.config",
    "opgraft.machine",
    "opgraft.compat",
    # The contract with devices, and the devices, which nothing above imports: entry points lead to them.
    "opgraft.platform",
    "opgraft.platforms",
    # Declarations, the choices among them with their reasons, and the state of the process.
    "opgraft.registry",
    # The plugin host.
    "opgraft.plugins",
    # Ops.
    "opgraft.binding",
    "opgraft.distributed",
    "opgraft.ops.*",  # families and what they share, in the order of their imports
    "opgraft.ops",  # the facade of the families
    "opgraft.functional",
    # Models.
    "opgraft.grafting",
    "opgraft.quantization",
    "opgraft.kernels",  # what kernel authors import, of the floors above
    "opgraft.models",
    "opgraft.compilation",
    "opgraft.engine",
    "opgraft.kernels.engine",
    "opgraft.engine.planning",
    "opgraft.platforms.tpu.slices",  # of the next line: it names the ranks of the engine
    "opgraft.platforms.tpu.engine",  # replaces parts of the engine; its platform imports it by name
    "opgraft.serving",
    "opgraft.testing",
    # The command line.
    "opgraft.cli",
    "opgraft.__main__",
    "opgraft",  # the lazy facade, which names every floor; nothing imports it
]
"""Imports point up this list. A name stands for its submodules too, unless they have a line of their own. A line that
ends in ``.*`` stands for a line of each submodule, in an order in which every import points up."""

_PATHS = "compiled code that is in the cache does without"
_CHILD = "built-in platforms need no process of their own"
LATE_IMPORTS = {
    ("binding.raised", "binding.functional"): "asked whether an op was ever imported",
    ("binding.raised", "binding.provenance"): "needs torch, which a failing test may do without",
    (
        "binding.shadow",
        "testing.catalogue",
    ): "tolerances lie with the proofs; read when runs differ",
    ("compilation.compiled", "compilation.generation"): _PATHS,
    ("compilation.compiled", "compilation.passes"): _PATHS,
    ("compilation.compiled", "compilation.shared_folder"): "few share a folder",
    ("compilation.compiled", "compilation.stock"): _PATHS,
    ("compilation.compiled", "compilation.verification"): _PATHS,
    ("compilation.lowering", "functional"): "registers forms that models seldom have",
    ("platforms.tpu.platform", "platforms.tpu.engine"): "needs the engine, which probes do without",
    ("plugins.admission", "plugins.locking"): "few have a lockfile",
    (
        "plugins.admission",
        "plugins.quarantine",
    ): "reads a file of records, when a plugin is admitted",
    ("plugins.class_source", "machine.child"): _CHILD,
    ("plugins.loading", "plugins.guarding"): "needs torch, which detection does without",
    ("plugins.platform_class", "plugins.guarding"): "needs torch, which detection does without",
    ("plugins.probing", "machine.child"): _CHILD,
    ("plugins.probing", "plugins.quarantine"): "a probe that ends its process is rare",
    ("plugins.selection", "plugins.class_source"): "few machines have a platform to look at",
    ("testing.pytest_plugin", "binding.raised"): "pytest loads its plugins at each start",
    ("testing.pytest_plugin", "testing.conformance"): "pytest loads its plugins at each start",
    ("testing.pytest_plugin", "testing.isolation"): "pytest loads its plugins at each start",
}
"""All imports by functions, of modules of opgraft in modules of opgraft, each with its reason. Commands import what
they need when they are called; facades import a public name when it is first used."""

IMPORT_WHEN_CALLED = ("opgraft", "opgraft.testing", "opgraft.cli")
"""The facades and the command line."""

CONTROL_FLOW = {
    "opgraft.cli.output": "AlreadyTold",  # an error that stands in a printed JSON object, its cause
    "opgraft.plugins.class_source": "_EndOfReading",  # likewise, within its module
    "opgraft.plugins.probing": "ProbeFailed",  # an outcome that selection records, never raised to a caller
    "opgraft.registry.adapter": "LeaveAlone",  # a verdict that the graft report shows
    "opgraft.serving.llm": "Interrupted",  # a KeyboardInterrupt that has what was computed
    "opgraft.grafting.expressions": "NotExpressible",  # a verdict that the recogniser of modules catches
    "opgraft.testing.departures": "NotTaken",  # inputs that the native definition refuses, too
    "opgraft.binding.reach": "AnyChild",  # a verdict on code whose calls cannot be read, caught where it is raised
}
"""Exceptions that are no errors, and so neither derive from OpgraftError nor live with the errors."""

PRIVATE_TORCH = "opgraft.compat"
"""The one place for private names of torch, each with a fallback."""

ENVIRONMENT = "opgraft.config.environment"
"""The one module that reads the environment."""

READS_OF_ENVIRONMENT = ("os.environ", "os.environb", "os.getenv")
BESIDE_THE_ENVIRONMENT = {
    "opgraft.binding.sharing": "sets the variable by which workers learn decisions",
    "opgraft.cli.env": "shows variables as they are",
    "opgraft.cli.isolation": "hands all variables on to a process",
    "opgraft.cli.serve": "sets a variable of the allocator before torch is imported",
    "opgraft.engine.workers.process_executor": "hands all variables on to workers",
    "opgraft.engine.workers.ray_executor": "hands variables on to workers",
    "opgraft.engine.workers.ray_placement": "sets variables of a worker",
    "opgraft.engine.workers.ray_worker": "sets variables of a worker",
    "opgraft.engine.workers.started_process": "notes the variables of a worker that starts early",
    "opgraft.machine.child": "hands variables on to a process",
    "opgraft.machine.machine": "keeps the environment as a part of the machine",
    "opgraft.platforms.tpu.engine": "sets variables that its libraries read",
    "opgraft.plugins.probing": "hands all variables on to a process",
    "opgraft.plugins.process": "compares variables before and after a plugin's import",
    "opgraft.serving.harmony": "sets the variable by which its library finds a vocabulary",
    "opgraft.testing.plugin_checks": "hands all variables on to a process",
    "opgraft.machine.scrubbing": "looks for the name of the user, to hide the name",
}
"""Modules that use the environment and take no setting from there, each with what it does."""

ROUNDABOUT = re.compile(r"\s*(The one|That|Those|Wh(at|ether|y|en|ere|ich|o)|How)\b")
"""Openings by which a docstring describes its subject from afar, where a verb or the subject's name would say it."""

VENDORS = """
nvidia cuda cudnn nccl nvml, amd rocm hip rccl miopen, intel xpu ipex xccl habana gaudi hpu, tpu libtpu xla,
npu cann hccl, mlu musa mps
"""
VENDOR_WORDS = frozenset(re.findall(r"\w+", VENDORS))


def first_party_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of each import of opgraft; 'from package import module' counts as the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield node.lineno, submodule if submodule in MODULES else node.module


def named_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each module that a module with ``import_module`` names in a string, to import it or have it."""
    if "import_module" in {name for _, name in identifiers(tree)}:
        yield from (
            (line, text) for line, text in texts(tree) if text in MODULES and text != "opgraft"
        )


def layers() -> Iterator[str]:
    """Every line of ``FLOORS``, with lines that end in ``.*`` written out."""
    for floor in FLOORS:
        if floor.endswith(".*"):
            yield from in_order(floor.removesuffix(".*"))
        else:
            yield floor


def in_order(package: str) -> Iterator[str]:
    """The modules and packages within a package, each after those that it imports; circles are an error."""
    depth = package.count(".") + 2
    inner = [module for module in MODULES if module.startswith(f"{package}.")]
    graph: dict[str, set[str]] = {}
    for module in inner:
        floor = ".".join(module.split(".")[:depth])
        imported = {name for _, name in first_party_imports(tree_of(MODULES[module]))}
        below = {".".join(name.split(".")[:depth]) for name in imported & {*inner}}
        graph.setdefault(floor, set()).update(below - {floor})
    return TopologicalSorter(graph).static_order()


LAYERS = list(layers())


def layer_of(module: str) -> str:
    return max((layer for layer in LAYERS if f"{module}.".startswith(f"{layer}.")), key=len)


def words(text: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)}


def private_torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    full_names = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            full_names |= {
                alias.asname: alias.name
                for alias in node.names
                if alias.asname and alias.name in found
            }
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "torch"
        ):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            full_names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
        elif isinstance(node, ast.Attribute):
            root, _, rest = dotted(node).partition(".")
            found = [f"{full_names[root]}.{rest}"] if root in full_names else []
        else:
            continue
        yield from ((node.lineno, name) for name in found if re.search(r"\._(?!_)", name))


def test_every_module_has_a_layer() -> None:
    """The list of layers names what exists: each line is a module, and each module has a line of its own or above."""
    assert [layer for layer in LAYERS if layer not in MODULES] == []
    facade_only = [m for m in MODULES if layer_of(m) == "opgraft" and m != "opgraft"]
    assert facade_only == [], "give these modules a line in LAYERS"


def test_imports_point_one_way() -> None:
    """A module imports from its own layer and from those above it in the list only."""
    found = [
        (module, line, name)
        for module, path in MODULES.items()
        for line, name in (*first_party_imports(tree_of(path)), *named_imports(tree_of(path)))
        if LAYERS.index(layer_of(name)) > LAYERS.index(layer_of(module))
    ]
    late = set(late_imports())
    assert [f"{m}, line {line}: {name}" for m, line, name in found if (m, name) not in late] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import_module('opgraft.testing.catalogue')", ["opgraft.testing.catalogue"]),
        ("NAME = 'opgraft.ops.spec'\nimportlib.import_module(NAME)", ["opgraft.ops.spec"]),
        ("import_module(name)\n'opgraft.ops.spec'", []),
        ("print('opgraft.ops.spec')", []),
    ],
)
def test_the_search_for_imports_by_name(source: str, found: list[str]) -> None:
    """A module's name in a string counts where something is imported by name, in documentation it does not."""
    assert [name for _, name in named_imports(ast.parse(source))] == found


def test_every_family_of_ops_has_a_layer() -> None:
    """No two families share a line, so that an import between them points one way."""
    within = {name for name in MODULES if name.startswith("opgraft.ops.") and name.count(".") == 2}
    assert {name for name in within if layer_of(name) != name} == set()


def test_imports_form_no_cycle() -> None:
    """Within a layer too, modules can be put in an order in which each imports earlier ones only."""
    graph = {
        module: {name for _, name in first_party_imports(tree_of(path))} - {module}
        for module, path in MODULES.items()
        if module != "opgraft"
    }
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


def imports_within_folders() -> dict[str, dict[str, set[str]]]:
    """By folder, the modules that each of its modules imports from the same folder, late or by name too."""
    folders: dict[str, dict[str, set[str]]] = {}
    for module, path in MODULES.items():
        found = (*first_party_imports(tree_of(path)), *named_imports(tree_of(path)))
        folder = folder_of(module)
        beside = {name for _, name in found if folder_of(name) == folder}
        folders.setdefault(folder, {})[module] = beside - {module}
    return folders


def folder_of(module: str) -> str:
    """The folder of a module. The module ``opgraft.ops`` counts for the folder above."""
    return module.rpartition(".")[0]


def test_no_circle_within_a_folder() -> None:
    """Each folder's modules can be put in an order, those that import late or by name too."""
    circles = {}
    for folder, graph in imports_within_folders().items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circles[folder] = " imports ".join(reversed(error.args[1]))
    assert circles == {}


def test_built_in_platforms_are_reached_by_entry_point() -> None:
    """Nothing imports a built-in platform: each is found through its entry point, like anyone's."""
    found = [
        f"{module}, line {line}: {name}"
        for module, path in MODULES.items()
        for line, name in first_party_imports(tree_of(path))
        if layer_of(name) == "opgraft.platforms" and not module.startswith("opgraft.platforms.")
    ]
    assert found == []


def late_imports() -> Iterator[tuple[str, str]]:
    """Yield each module with a module that one of its functions imports, or that it imports by name."""
    for module, path in MODULES.items():
        tree = tree_of(path)
        for function in functions(tree):
            yield from ((module, name) for _, name in first_party_imports(function))
        yield from ((module, name) for _, name in named_imports(tree))


def test_late_imports_stand_in_the_table() -> None:
    """No function imports from opgraft, save where a start counts: a late import hides a circle."""
    short = re.compile(r"^opgraft\.")
    found = {
        (short.sub("", module), short.sub("", name))
        for module, name in late_imports()
        if module not in IMPORT_WHEN_CALLED and not module.startswith("opgraft.cli.")
    }
    assert found == {*LATE_IMPORTS}


def test_no_assert_statements() -> None:
    """No assert outside tests: it disappears under -O, and says nothing to the user."""
    found = [
        f"{path}:{node.lineno}"
        for path in SHIPPED
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_grep_finds_the_class_of_every_kernel() -> None:
    """The text of a class with a table ``functional_<key>`` names the method that the table makes."""
    missing = []
    for name, path in MODULES.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            source = "\n".join(lines[node.lineno : node.end_lineno])
            keys = re.findall(r"\bfunctional_(cuda|hip|xpu|tpu)\b", source)
            missing += [
                f"{name}.{node.name}: {key}" for key in keys if f"forward_{key}" not in source
            ]
    assert missing == []


def test_docstrings_come_to_the_point() -> None:
    """No docstring but of tests, which make claims, opens with a question word, "That", "Those" or "The one"."""
    code = [path for path in (*SHIPPED, *OURS) if not path.is_relative_to(REPOSITORY / "tests")]
    described = {path: list(docstrings(tree_of(path))) for path in code}
    assert sum(map(len, described.values())) > 1000, "the search finds docstrings"
    found = [
        f"{path}:{line}: {text:.40}"
        for path, rows in described.items()
        for line, text in rows
        if ROUNDABOUT.match(text)
    ]
    assert found == []


def test_no_folder_becomes_harder_to_read() -> None:
    """No figure of a folder is worse than the goal and than the record of that folder."""
    record = json.loads(legibility.RECORD.read_text(encoding="utf-8"))
    behind = []
    for folder, figures in legibility.figures_by_folder().items():
        for name, value in figures.items():
            goal, recorded = legibility.GOALS[name], record.get(folder, {}).get(name)
            least = goal.least if recorded is None else min(goal.least, recorded)
            most = goal.most if recorded is None else max(goal.most, recorded)
            if not least <= value <= most:
                behind.append(f"{folder}: {goal.title} is {value}, wanted {least} to {most}")
    assert behind == [], "tools/legibility.py --worst 20 FOLDER lists the hardest places"


def test_the_figures_of_a_file(tmp_path: Path) -> None:
    """Each figure of a small file is the one that a reader counts."""
    (tmp_path / "small.py").write_text(SMALL, encoding="utf-8")
    figures = legibility.read([tmp_path / "small.py"]).figures()
    nodes = ("Assign", "Name", "Store", "BinOp", "Name", "Load", "Add", "Name", "Load")
    assert figures["nodes_of_largest"] == len(nodes)
    assert figures["nodes_per_line"] == figures["nodes_per_statement"] == len(nodes)
    assert figures["wide_lines"] == pytest.approx(100 / 9)
    assert figures["comments"] == pytest.approx(100 / 9)
    assert figures["docstring_words"] == pytest.approx(100 * 7 / 9)
    assert figures["relative"] == pytest.approx(100 * 1 / 7)
    assert figures["pronouns"] == pytest.approx(1000 * 1 / 10)
    assert figures["openings"] == 50


SMALL = f'''"""Tell what runs."""

# The reason why.
def double(x):
    """Add ``x`` to it."""
    y = x + x


{"Z" * 101} = 1
'''


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("What a probe found.", True),
        ("Whether it fits.", True),
        ("The one place for it.", True),
        ("The ones that fit.", False),
        ("\n    Which kernel it runs.", True),
        ("Tell whether it fits.", False),
        ("Whole rows.", False),
        ("However often.", False),
    ],
)
def test_the_search_for_roundabout_openings(text: str, found: bool) -> None:
    """Openings are recognised as whole words, and at the beginning only."""
    assert bool(ROUNDABOUT.match(text)) == found


def test_vendor_names_stay_with_the_platforms() -> None:
    """Outside platforms/, vendors appear as dispatch keys only: in names of kernels, and where the keys are listed."""
    named = []
    for module, path in MODULES.items():
        if module.startswith("opgraft.platforms."):
            continue
        tree = tree_of(path)
        keys = DISPATCH_KEYS if module == "opgraft.platform" else ()
        found = [
            *identifiers(tree),
            *((line, text) for line, text in texts(tree) if text not in keys),
        ]
        without_keys = (
            (line, re.sub(r"(forward|functional)_\w+", "", text)) for line, text in found
        )
        named += [
            f"{module}, line {line}: {text}"
            for line, text in without_keys
            if words(text) & VENDOR_WORDS
        ]
    assert named == []


def test_private_names_of_torch_stay_in_one_place() -> None:
    """Private names of torch occur in opgraft.compat only, where each has a fallback."""
    found = {
        module: names
        for module, path in MODULES.items()
        if not f"{module}.".startswith(f"{PRIVATE_TORCH}.")
        and (names := list(private_torch_names(tree_of(path))))
    }
    assert found == {}


def test_the_environment_is_read_in_one_place() -> None:
    """Modules of the package take variables from opgraft.config.environment."""
    users = set()
    for module, path in MODULES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in READS_OF_ENVIRONMENT:
                users.add(module)
    assert users - {ENVIRONMENT} == BESIDE_THE_ENVIRONMENT.keys()


WRITABLE = re.compile(r"opgraft\.(cli|testing|platforms)\b|opgraft\.ops\..*\bspec$")
"""Parts whose tables are of commands, tests, chips and proofs."""

_TABLES = ast.Dict | ast.DictComp | ast.Set | ast.SetComp

FILLED_LATER = {"opgraft.config.declaration.KINDS"}


def test_tables_are_read_only() -> None:
    """A plugin cannot write into a public table of a module, such as that of the poolings."""
    found = []
    for module, path in MODULES.items():
        if WRITABLE.match(module):
            continue
        for node in tree_of(path).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                name = dotted(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                if name.isupper() and isinstance(node.value, _TABLES):
                    found.append(f"{module}.{name}")
    public = [name for name in found if not name.rpartition(".")[2].startswith("_")]
    assert sorted({*public} - FILLED_LATER) == [], "use MappingProxyType or frozenset"


def test_errors_live_in_one_module() -> None:
    """Every error is defined in opgraft.errors."""
    known = {name for name, value in vars(builtins).items() if _is_exception(value)}
    known |= {
        node.name
        for node in ast.walk(tree_of(MODULES["opgraft.errors"]))
        if isinstance(node, ast.ClassDef)
    }
    defined = [
        (module, node.name)
        for module, path in MODULES.items()
        if module != "opgraft.errors"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and known & {dotted(base).split(".")[-1] for base in node.bases}
    ]
    assert [place for place in defined if place not in CONTROL_FLOW.items()] == []


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def test_errors_have_one_base() -> None:
    """Every class in opgraft.errors derives from OpgraftError, the one base that users can catch."""
    defined = [
        value
        for value in vars(errors).values()
        if _is_exception(value) and value.__module__ == errors.__name__
    ]
    assert [error for error in defined if not issubclass(error, errors.OpgraftError)] == []
    assert len(defined) > 1


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\nx = torch._dynamo.config", ["torch._dynamo", "torch._dynamo.config"]),
        ("from torch._inductor import config", ["torch._inductor.config"]),
        ("from torch import nn\nnn.functional._verify", ["torch.nn.functional._verify"]),
        (
            "import torch\ntorch.ops.mkldnn._linear_pointwise(x)",
            ["torch.ops.mkldnn._linear_pointwise"],
        ),
        ("import torch\ntorch.nn.Module.__new__(cls)", []),
        ("op._modules", []),
    ],
)
def test_the_search_for_private_names(source: str, found: list[str]) -> None:
    """The search sees through aliases and leaves dunder names and other people's underscores alone."""
    assert sorted(name for _, name in private_torch_names(ast.parse(source))) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("CudaGraph", True),
        ("is_cuda", True),
        ("xpu", True),
        ("cpu", False),
        ("relationship", False),
        ("Intel", True),
    ],
)
def test_the_search_for_vendor_names(text: str, found: bool) -> None:
    """Vendor names are recognised as whole words, in snake case and camel case."""
    assert bool(words(text) & VENDOR_WORDS) == found
