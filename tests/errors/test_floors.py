"""Who may import whom. Imports go down the table only, so every module can be read knowing what lies below it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the ground up. A module may import those of the rows above its own here, and none of its own row.
FLOORS = [
    "passes.errors",
    "passes.matrix passes.places",
    "passes.pieces passes.slopes",
    "passes.uses",
    "passes.registration",
    "passes.ir",
    "passes.layers.declaration",
    "passes.layers.contraction passes.layers.geometry passes.layers.rows",
    "passes.layers.embedding passes.layers.linear passes.layers.patches",
    "passes.layers.*",
    "passes.layers",
    # Tools that several passes share.
    "passes.cells passes.checkpoints passes.devices passes.holder passes.masks passes.operations passes.pytree "
    "passes.signatures passes.sizes passes.stand_ins passes.writer",
    "passes.labels passes.recurrent passes.timeline passes.views",
    "passes.gains",
    "passes.approximation passes.attributes passes.border passes.elements passes.experts passes.native passes.parts "
    "passes.spelling passes.values passes.watch passes.writes",
    "passes.hooks",
    "passes.calls passes.cases passes.claims passes.cut_plan passes.flat passes.inplace passes.leftovers",
    "passes.derivatives passes.readers passes.symbolic",
    # The passes: they meet in the pipeline and talk through the IR.
    "passes.trace passes.unroll passes.normalize passes.losses passes.expressions passes.match passes.cut passes.link "
    "passes.resolve passes.check passes.rewrite passes.submodules passes.padding passes.verify",
    "passes.submodule_masks",
    "passes.pipeline",
    "passes.divide",
    "passes",
    "kfac_fx.backends kfac_fx.examples kfac_fx.frames kfac_fx.krylov kfac_fx.linalg kfac_fx.precision "
    "kfac_fx.progress kfac_fx.structure kfac_fx.wrappers",
    "kfac_fx.chain kfac_fx.loss_function kfac_fx.rows",
    "kfac_fx.statistics kfac_fx.losses kfac_fx.subsample",
    "kfac_fx.lagged",
    "kfac_fx.pieces kfac_fx.sloped",
    "kfac_fx.factors kfac_fx.loss_spec kfac_fx.moments kfac_fx.registered_losses kfac_fx.sources kfac_fx.use_rows",
    "kfac_fx.averaged",
    "kfac_fx.groups kfac_fx.pullback kfac_fx.tap",
    "kfac_fx.rooted",
    "kfac_fx.exact kfac_fx.inverses kfac_fx.link kfac_fx.masks kfac_fx.series kfac_fx.sua kfac_fx.wide",
    "kfac_fx.blocks kfac_fx.curvature kfac_fx.emitted",
    "kfac_fx.masked_inputs kfac_fx.output_losses",
    "kfac_fx.recorder",
    "kfac_fx.declared kfac_fx.divided kfac_fx.likeness kfac_fx.proof_tap",
    "kfac_fx.agreement kfac_fx.captured kfac_fx.proof kfac_fx.registry",
    "kfac_fx.division_recorder",
    "kfac_fx.captures kfac_fx.steps kfac_fx.sums",
    # The layer collection, from what it holds to what users call.
    "kfac_fx.declared_block kfac_fx.find_use",
    "kfac_fx.registered_block",
    "kfac_fx.fisher_blocks",
    "kfac_fx.fisher_factor kfac_fx.kinds",
    "kfac_fx.names",
    "kfac_fx.collection",
    "kfac_fx.default_approximations kfac_fx.register_losses",
    "kfac_fx.register_convolutions",
    "kfac_fx.recaptured kfac_fx.register_layers kfac_fx.scan",
    "kfac_fx.layer_collection",
    "kfac_fx.report_rows kfac_fx.report_graph kfac_fx.report_html",
    "kfac_fx.report",
    "kfac_fx.compiled_module",
    "kfac_fx.compiler",
    "kfac_fx.fisher kfac_fx.distributed",
    "kfac_fx.estimator",
    "kfac_fx.closure kfac_fx.damping kfac_fx.flat kfac_fx.quadratic",
    "kfac_fx.first_order",
    "kfac_fx.watched",
    "kfac_fx.loss_scale kfac_fx.micro_batches kfac_fx.momentum kfac_fx.options",
    "kfac_fx.update",
    "kfac_fx.parameter_groups",
    "kfac_fx.schedule kfac_fx.updater",
    "kfac_fx.forwards",
    "kfac_fx.stepper",
    "kfac_fx.checkpoint",
    "kfac_fx.optimizer",
    "kfac_fx",
    # The programs, which use the public API as anybody would.
    "kfac_fx.demo.settings kfac_fx.demo.tasks",
    "kfac_fx.demo.training",
    "kfac_fx.demo.results",
    "kfac_fx.demo.plot",
    "kfac_fx.demo",
    "kfac_fx.cli",
]

# The numerical runtime knows what a registration is, and nothing else of the compiler.
NUMERICAL = {
    f"kfac_fx.{name}"
    for name in (
        "linalg",
        "chain",
        "rows",
        "statistics",
        "lagged",
        "factors",
        "averaged",
        "groups",
        "krylov",
        "rooted",
        "series",
        "sua",
        "wide",
        "inverses",
        "fisher",
        "pieces",
        "loss_function",
        "losses",
        "loss_spec",
        "blocks",
        "curvature",
    )
}
SHARED_WORDS = {"passes.errors", "passes.matrix", "passes.pieces", "passes.ir"}

# passes/__init__.py imports itself by its installed name, to be one package under both names.
ALIAS = ("passes", "kfac_fx.passes")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    """Every module by name; the compiler's once, as `passes`, though the tracked link shows it a second time."""
    found = [*(ROOT / "passes").rglob("*.py"), *(ROOT / "kfac_fx").rglob("*.py")]
    return {module_name(path): path for path in found if path.relative_to(ROOT).parts[:2] != ("kfac_fx", "passes")}


SOURCES = sources()
ROWS = {name: number for number, row in enumerate(FLOORS) for name in row.split()}


def floor(module: str) -> int | None:
    family = f"{module.rpartition('.')[0]}.*"
    return ROWS.get(module, ROWS.get(family))


def imports(module: str, tree: ast.AST, is_package: bool) -> Iterator[tuple[str, bool]]:
    """(name as written but absolute, was it relative) of every import of ours, wherever in the module it stands.

    `from p import n` gives `p.n` if that is a module, else `p`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            up = node.level - is_package
            parent = [*parents[: len(parents) - up], node.module] if node.level else [node.module]
            source = ".".join(part for part in parent if part)
            names = [
                (inner if is_module(inner := f"{source}.{alias.name}") else source, node.level > 0)
                for alias in node.names
            ]
        else:
            continue
        yield from ((name, relative) for name, relative in names if name.split(".")[0] in ("passes", "kfac_fx"))


def is_module(name: str) -> bool:
    return shorten(name) in SOURCES or shorten(name) in ROWS


def shorten(name: str) -> str:
    return name.removeprefix("kfac_fx.") if name.split(".")[:2] == ["kfac_fx", "passes"] else name


def complaints(module: str, source: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of one module."""
    found = []
    own = floor(module)
    assert own is not None, f"{module} is not in the table"
    compiler = module.split(".")[0] == "passes"
    for written, relative in imports(module, ast.parse(source), is_package):
        if (module, written) == ALIAS:
            continue
        if compiler and not relative:
            found.append(f"{module} imports {written} absolutely; inside passes/ imports are relative")
        name = shorten(written)
        below = floor(name)
        if below is None:
            found.append(f"{module} imports {name}, which is not in the table of floors")
        elif below >= own:
            way = "sideways" if below == own else "up"
            found.append(f"{module} imports {name}: that is {way}, and imports go down only")
        elif module in NUMERICAL and name.startswith("passes") and name not in SHARED_WORDS:
            found.append(f"{module} imports {name}; of the compiler it may know only {sorted(SHARED_WORDS)}")
    return found


def test_every_module_has_a_floor() -> None:
    homeless = sorted(name for name in SOURCES if floor(name) is None)
    assert not homeless, f"give these modules a row in FLOORS of {Path(__file__).name}: {homeless}"


@pytest.mark.parametrize("module", sorted(name for name in SOURCES if floor(name) is not None))
def test_imports_go_down(module: str) -> None:
    path = SOURCES[module]
    found = complaints(module, path.read_text(encoding="utf-8"), path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("passes.match", "from .resolve import resolve", "sideways"),
        ("passes.match", "from . import resolve", "sideways"),
        ("passes.ir", "from .match import match", "up"),
        ("passes.match", "from passes.ir import Use", "relative"),
        ("passes.match", "import kfac_fx", "up"),
        ("passes.layers.conv", "from .norm import layer_norm", "sideways"),
        ("kfac_fx.blocks", "def f():\n    from kfac_fx.estimator import FisherEstimator", "up"),
        ("kfac_fx.blocks", "if TYPE_CHECKING:\n    import kfac_fx.optimizer", "up"),
        ("kfac_fx.blocks", "from kfac_fx.passes.pipeline import run", "may know only"),
        ("kfac_fx.compiler", "from kfac_fx.nowhere import x", "not in the table"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str, wrong: str) -> None:
    assert any(wrong in complaint for complaint in complaints(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("passes.layers.conv", "from ..ir import Attrs\nfrom .declaration import layer"),
        ("passes.match", "from . import ir\nimport torch"),
        ("kfac_fx.blocks", "from kfac_fx.factors import Factor\nfrom kfac_fx.passes.ir import Registration"),
        ("kfac_fx.cli", "import kfac_fx"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert complaints(module, source) == []
