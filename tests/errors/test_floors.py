"""Who may import whom: imports go down the table of floors, and no circle of imports exists."""

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[2]

# From the ground up. A row names folders and modules; a module may import from its own row and from the rows above it.
FLOORS = {
    "data": "passes.errors passes.torch_private passes.torch_losses passes.approximations passes.results passes.matrix "
    "passes.parametrization passes.ir",
    "graphs": "passes.graphs",
    "declarations": "passes.cases passes.complex_parameters passes.layers passes.parametrizations",
    "tracing": "passes.tracing",
    "passes": "passes.trace passes.unroll passes.normalize passes.losses passes.expressions "
    "passes.match passes.resolve passes.check passes.rewrite passes.submodules passes.padding",
    "pipelines": "passes.pipeline passes.divide passes",
    "linalg": "kfac_fx.linalg",
    "losses": "kfac_fx.losses",
    "recording": "kfac_fx.recording",
    "fisher": "kfac_fx.fisher",
    "compiled": "kfac_fx.compiled",
    "estimator": "kfac_fx.estimator",
    "optim": "kfac_fx.optim",
    "public": "kfac_fx",
    "cli": "kfac_fx.cli kfac_fx.__main__",
}

# The numerical rooms know what a registration is, and no other part of the compiler.
NUMERICAL = ("kfac_fx.linalg.", "kfac_fx.losses.", "kfac_fx.recording.statistics", "kfac_fx.fisher.")
SHARED = {
    "passes.approximations",
    "passes.errors",
    "passes.torch_losses",
    "passes.matrix",
    "passes.parametrization",
    "passes.results",
    "passes.torch_private",
    "passes.ir",
}

# passes/__init__.py imports itself by its installed name, to be one package under both names.
ALIAS = ("passes", "kfac_fx.passes")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    """Every module by name. The compiler's modules appear once, as `passes`, although the link shows them twice."""
    paths = [*(ROOT / "passes").rglob("*.py"), *(ROOT / "kfac_fx").rglob("*.py")]
    return {module_name(path): path for path in paths if path.relative_to(ROOT).parts[:2] != ("kfac_fx", "passes")}


SOURCES = sources()
FLOOR = {place: number for number, row in enumerate(FLOORS.values()) for place in row.split()}
PASSES = set(FLOORS["passes"].split())


def place(module: str) -> str:
    """The folder that a module lies in, or the module itself on the top level of a package."""
    return ".".join(module.split(".")[:2])


def imports(module: str, tree: ast.AST, is_package: bool) -> Iterator[tuple[str, bool]]:
    """(absolute name as written, whether it was relative) of every import of the library, anywhere in the module.

    `from p import n` gives `p.n` if that is a module, else `p`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            parent = [*parents[: len(parents) - node.level + is_package], node.module] if node.level else [node.module]
            source = ".".join(part for part in parent if part)
            inner = [f"{source}.{alias.name}" for alias in node.names]
            names = [(name if shorten(name) in SOURCES else source, node.level > 0) for name in inner]
        else:
            continue
        yield from ((name, relative) for name, relative in names if name.split(".")[0] in ("passes", "kfac_fx"))


def shorten(name: str) -> str:
    return name.removeprefix("kfac_fx.") if name.split(".")[:2] == ["kfac_fx", "passes"] else name


def complaints(module: str, source: str, is_package: bool = False) -> list[str]:
    """Every import of one module that the floors forbid, and why."""
    wrong = []
    compiler = module.split(".")[0] == "passes"
    for written, relative in imports(module, ast.parse(source), is_package):
        name = shorten(written)
        if (module, written) == ALIAS or name == module:
            continue
        if compiler and not relative:
            wrong.append(f"{module} imports {written} absolutely; inside passes/ imports are relative")
        if place(name) not in FLOOR:
            wrong.append(f"{module} imports {name}, which is not in the table of floors")
        elif FLOOR[place(name)] > FLOOR[place(module)]:
            wrong.append(f"{module} imports {name}: that is up, and imports go down only")
        elif module in PASSES and name in PASSES:
            wrong.append(f"{module} imports {name}: passes meet in the pipeline and talk through the Program only")
        elif module.startswith(NUMERICAL) and name.startswith("passes") and name not in SHARED:
            wrong.append(f"{module} imports {name}; of the compiler it may know only {sorted(SHARED)}")
    return wrong


def test_every_module_has_a_floor() -> None:
    homeless = sorted(name for name in SOURCES if place(name) not in FLOOR)
    assert not homeless, f"give these modules a place in FLOORS of {Path(__file__).name}: {homeless}"


def test_every_place_of_the_table_exists() -> None:
    assert FLOOR.keys() == {place(name) for name in SOURCES}


def test_imports_go_down() -> None:
    wrong = [
        complaint
        for module, path in SOURCES.items()
        for complaint in complaints(module, path.read_text(encoding="utf-8"), path.name == "__init__.py")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("of", [lambda module: module, place], ids=["modules", "folders"])
def test_no_circle_of_imports(of) -> None:  # type: ignore[no-untyped-def]
    graph = nx.DiGraph()
    for module, path in SOURCES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        targets = {shorten(name) for name, _ in imports(module, tree, path.name == "__init__.py")}
        graph.add_edges_from((of(module), of(target)) for target in targets if of(target) != of(module))
    circles = [circle for circle in nx.strongly_connected_components(graph) if len(circle) > 1]
    assert not circles


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("passes.match", "from .resolve import resolve", "passes meet in the pipeline"),
        ("passes.match", "from . import resolve", "passes meet in the pipeline"),
        ("passes.ir", "from .match import match", "up"),
        ("passes.match", "from passes.ir import Use", "relative"),
        ("passes.match", "import kfac_fx", "up"),
        ("kfac_fx.fisher.block", "def f():\n    from kfac_fx.estimator.estimator import FisherEstimator", "up"),
        ("kfac_fx.fisher.block", "if TYPE_CHECKING:\n    import kfac_fx.optim.optimizer", "up"),
        ("kfac_fx.fisher.block", "from kfac_fx.passes.pipeline import run", "may know only"),
        ("kfac_fx.compiled.compiled_module", "from kfac_fx.nowhere import x", "not in the table"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str, wrong: str) -> None:
    assert any(wrong in complaint for complaint in complaints(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("passes.layers.conv", "from ..ir import Attrs\nfrom .declaration import layer"),
        ("passes.match", "from . import ir\nimport torch"),
        ("kfac_fx.fisher.block", "import kfac_fx.fisher.groups\nfrom kfac_fx.passes.ir import Registration"),
        ("kfac_fx.cli", "import kfac_fx"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert complaints(module, source) == []
