"""Who may import whom. Imports go down the table only, so every module can be read knowing what lies below it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the ground up. A module may import those of the rows above its own here, and none of its own row.
FLOORS = [
    # A folder of its own has no more than a line on what it holds.
    "passes.words passes.graphs passes.capture passes.matching passes.claiming",
    "passes.errors passes.graphs.failures",
    "passes.words.matrix passes.words.places",
    "passes.words.pieces passes.words.slopes",
    "passes.words.uses",
    "passes.words.registration",
    "passes.ir",
    "passes.layers.declaration",
    "passes.layers.contraction passes.layers.geometry passes.layers.rows",
    "passes.layers.elementwise passes.layers.embedding passes.layers.linear passes.layers.patches",
    "passes.layers.*",
    "passes.layers",
    # Tools that several passes share.
    "passes.capture.attributes passes.graphs.cells passes.capture.certain passes.capture.checkpoints "
    "passes.capture.detached passes.capture.devices passes.graphs.holder passes.graphs.masks "
    "passes.graphs.operations passes.graphs.pytree passes.graphs.signatures passes.graphs.sizes "
    "passes.capture.stand_ins passes.graphs.writer",
    "passes.graphs.labels passes.capture.recurrent passes.graphs.timeline passes.graphs.views",
    "passes.claiming.gains passes.graphs.inplace passes.matching.linear_maps",
    "passes.claiming.approximation passes.capture.border passes.matching.elements passes.graphs.experts "
    "passes.matching.gathers passes.graphs.literals passes.graphs.native passes.graphs.spelling "
    "passes.matching.values passes.capture.watch passes.capture.writes",
    "passes.capture.function_calls passes.capture.hooks passes.matching.jacobians passes.matching.means "
    "passes.matching.products passes.capture.reads",
    "passes.claiming.flattened",
    "passes.capture.own_backwards passes.claiming.parts",
    "passes.matching.binding passes.capture.calls passes.graphs.cases passes.claiming.claims "
    "passes.claiming.cut_plan passes.capture.flat passes.matching.functions passes.claiming.leftovers",
    "passes.capture.derivatives passes.capture.following passes.capture.symbolic",
    "passes.capture.readers",
    # The passes: they meet in the pipeline and talk through the IR.
    "passes.trace passes.unroll passes.normalize passes.losses passes.expressions passes.match passes.cut "
    "passes.link passes.resolve passes.check passes.rewrite passes.submodules passes.padding passes.verify",
    "passes.submodule_masks",
    "passes.capture.captured passes.pipeline",
    "passes.divide",
    "passes",
    # The runtime, folder by folder; a folder of its own has no more than a line on what it holds.
    "kfac_fx.linalg kfac_fx.statistics kfac_fx.factors kfac_fx.blocks kfac_fx.taps kfac_fx.recording "
    "kfac_fx.checks kfac_fx.captures kfac_fx.collection kfac_fx.optim",
    "kfac_fx.linalg.flat kfac_fx.linalg.krylov kfac_fx.linalg.matrices kfac_fx.linalg.pieces kfac_fx.linalg.precision",
    "kfac_fx.linalg.chain",
    "kfac_fx.losses.loss_function",
    "kfac_fx.losses.distributions kfac_fx.losses.registered_losses kfac_fx.losses.sources",
    "kfac_fx.losses.loss_spec",
    "kfac_fx.losses",
    "kfac_fx.statistics.rows",
    "kfac_fx.statistics.row_sums",
    "kfac_fx.statistics.lagged kfac_fx.statistics.moments",
    "kfac_fx.factors.factor",
    "kfac_fx.factors.averaged",
    "kfac_fx.factors.groups",
    "kfac_fx.factors.inverses kfac_fx.factors.sua kfac_fx.factors.wide",
    "kfac_fx.blocks.rooted",
    "kfac_fx.blocks.series",
    "kfac_fx.blocks.block",
    "kfac_fx.blocks.spectrum",
    "kfac_fx.blocks.fisher",
    "kfac_fx.taps.factored kfac_fx.taps.sloped kfac_fx.taps.subsample",
    "kfac_fx.taps.flat_rows",
    "kfac_fx.taps.use_rows",
    "kfac_fx.taps.tap",
    "kfac_fx.taps.link",
    "kfac_fx.recording.backends kfac_fx.recording.examples kfac_fx.recording.masks kfac_fx.recording.progress "
    "kfac_fx.recording.pullback",
    "kfac_fx.recording.emitted kfac_fx.recording.exact",
    "kfac_fx.recording.output_losses",
    "kfac_fx.recording.recorder",
    "kfac_fx.checks.likeness kfac_fx.checks.proof_tap kfac_fx.checks.structure kfac_fx.checks.wrappers",
    "kfac_fx.checks.proof",
    "kfac_fx.captures.agreement kfac_fx.captures.declared kfac_fx.captures.frames kfac_fx.captures.masked_inputs",
    "kfac_fx.captures.served_reads",
    "kfac_fx.captures.divided",
    "kfac_fx.captures.division_recorder",
    "kfac_fx.captures.captures",
    # The layer collection, from what it holds to what users call.
    "kfac_fx.collection.captured kfac_fx.collection.recaptured kfac_fx.collection.registry kfac_fx.collection.sums",
    "kfac_fx.collection.find_use kfac_fx.collection.names kfac_fx.collection.steps",
    "kfac_fx.collection.declared_block",
    "kfac_fx.collection.registered_block",
    "kfac_fx.fisher_blocks",
    "kfac_fx.collection.fisher_factor kfac_fx.collection.kinds",
    "kfac_fx.collection.collection",
    "kfac_fx.collection.collected_losses kfac_fx.collection.default_approximations",
    "kfac_fx.collection.register_convolutions kfac_fx.collection.register_losses kfac_fx.collection.scan",
    "kfac_fx.collection.register_layers",
    "kfac_fx.layer_collection",
    "kfac_fx.report.graph kfac_fx.report.html kfac_fx.report.rows",
    "kfac_fx.report.report",
    "kfac_fx.report",
    "kfac_fx.compiled_module",
    "kfac_fx.compiler kfac_fx.distributed",
    "kfac_fx.estimator",
    # The optimizer.
    "kfac_fx.optim.closure kfac_fx.optim.curvature kfac_fx.optim.damping kfac_fx.optim.first_order "
    "kfac_fx.optim.quadratic kfac_fx.optim.watched",
    "kfac_fx.optim.loss_factors",
    "kfac_fx.optim.loss_scale kfac_fx.optim.micro_batches kfac_fx.optim.momentum kfac_fx.optim.options",
    "kfac_fx.optim.schedule kfac_fx.optim.uncovered kfac_fx.optim.update",
    "kfac_fx.optim.parameter_groups",
    "kfac_fx.optim.forwards kfac_fx.optim.updater",
    "kfac_fx.optim.stepper",
    "kfac_fx.optim.checkpoint",
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
NUMERICAL = ("kfac_fx.linalg.", "kfac_fx.losses.", "kfac_fx.statistics.", "kfac_fx.factors.", "kfac_fx.blocks.")
SHARED_WORDS = {"passes.errors", "passes.words.matrix", "passes.words.pieces", "passes.ir"}

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
        elif module.startswith(NUMERICAL) and name.startswith("passes") and name not in SHARED_WORDS:
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
        ("kfac_fx.blocks.block", "def f():\n    from kfac_fx.estimator import FisherEstimator", "up"),
        ("kfac_fx.blocks.block", "if TYPE_CHECKING:\n    import kfac_fx.optimizer", "up"),
        ("kfac_fx.blocks.block", "from kfac_fx.passes.pipeline import run", "may know only"),
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
        ("kfac_fx.blocks.block", "import kfac_fx.factors.factor\nfrom kfac_fx.passes.ir import Registration"),
        ("kfac_fx.cli", "import kfac_fx"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert complaints(module, source) == []
