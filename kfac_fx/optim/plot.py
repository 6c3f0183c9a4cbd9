"""Figures of a training with K-FAC, as `matplotlib.figure.Figure`s: `pip install 'kfac_fx[plot]'`.

history = kfac_fx.plot.History()
kfac_fx.Metrics(optimizer, history, every=10)
...  # train
kfac_fx.plot.training(history).savefig("training.png")
kfac_fx.plot.phases(history).savefig("phases.png")
kfac_fx.plot.spectra(optimizer).savefig("spectra.png")
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.linalg.matrices import full_precision
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.state import PHASES
from kfac_fx.passes.errors import nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["History", "phases", "spectra", "training"]

INK, SOFT = "#1c2430", "#5c6675"
BLUE = "#2f6db3"
PHASE_COLORS = dict(zip(PHASES, ("#8a8f98", "#2f6db3", "#d9822b", "#5b9a6f"), strict=True))
NAMED = 8  # spectra of more blocks have a scale of colors instead of names
LOWEST = 1e-9  # of a spectrum, relative to the largest eigenvalue: below are rounding errors of float32
EMPTY = "History has no values: pass it as write to kfac_fx.Metrics(optimizer, history, every=n) and train n steps"


class History:
    """The values of a `Metrics` by step: `Metrics(optimizer, history, every=10)`.

    Attributes:
        steps: the steps that were read.
        values: the values of every step, by name.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[dict[str, float]] = []

    def __call__(self, values: Mapping[str, float], step: int) -> None:
        self.steps.append(step)
        self.values.append(dict(values))

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> list[float]:
        """The values of one name over the steps, NaN where a step lacks it. Raises KeyError if every step lacks it."""
        names = dict.fromkeys(key for values in self.values for key in values)
        if name not in names:
            raise KeyError(f"no step has a value {name!r}.{nearest(name, names)}" if names else EMPTY)
        return [values.get(name, math.nan) for values in self.values]


def training(history: History) -> Figure:
    """Damping and ρ over the steps; for the default, which has no damping, the norm of the update and ρ.

    ρ is the measured change of the loss over the predicted one. The damping falls while ρ is above 0.75, and rises
    where ρ is below 0.25. Values before the first measured step are left out.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: without any values.
    """
    figure = new_figure(4.8)
    above, below = figure.subplots(2, 1, sharex=True)
    steps = read_steps(history)
    marker = "." if len(steps) <= 50 else ""
    damped = any("damping" in values for values in history.values)
    measured = [values.get("rho", math.nan) for values in history.values]
    above.plot(steps, history["damping" if damped else "norm/update"], BLUE, marker=marker)
    above.set_yscale("log")
    above.set_ylabel("damping" if damped else "norm of the update", color=SOFT)
    below.plot(steps, measured, BLUE, marker=marker)
    for bound in (0.25, 0.75) if damped else (1.0,):
        below.axhline(bound, color=SOFT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    rho = torch.tensor(measured, dtype=torch.float64)
    rho = rho[rho.isfinite()]
    if len(rho):  # one bad step must not hide the others
        low, high = rho.quantile(0.05).item(), rho.quantile(0.95).item()
        below.set_ylim(min(-0.1, low - 0.1), max(1.5, high + 0.1))
    below.set_ylabel("ρ", color=SOFT)
    below.set_xlabel("step", color=SOFT)
    for axes in (above, below):
        style(axes)
    return figure


def phases(history: History) -> Figure:
    """The milliseconds of a step by phase over the steps, and the share of every phase in all of them.

    The phases are those of `Metrics`, `seconds/...`: K-FAC's own work, without forward and backward of the model. The
    first values hold captures and proofs, which happen once, so neither the shares nor the height of the figure count
    them if there are others.

    Raises: as `training`.
    """
    figure = new_figure(3.2)
    axes = figure.subplots()
    steps = read_steps(history)
    later = slice(1 if len(steps) > 1 else 0, None)
    lengths = torch.tensor([0, *steps]).diff()[later]
    milliseconds = {phase: [1000 * value for value in history[f"seconds/{phase}"]] for phase in PHASES}
    sums = {phase: float(torch.tensor(values[later]).mul(lengths).sum()) for phase, values in milliseconds.items()}
    whole = sum(sums.values()) or 1.0
    labels = [f"{phase} {sums[phase] / whole:.0%}" for phase in PHASES]
    # The value of a step is the mean since the last one.
    edges = [0, *steps]
    bottom = torch.zeros(len(steps))
    for phase, label in zip(PHASES, labels, strict=True):
        top = bottom + torch.tensor(milliseconds[phase])
        axes.stairs(top.tolist(), edges, baseline=bottom.tolist(), fill=True, color=PHASE_COLORS[phase], label=label)
        bottom = top
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(0, 1.05 * (float(bottom[later].max()) or 1.0))
    axes.set_xlabel("step", color=SOFT)
    axes.set_ylabel("ms a step", color=SOFT)
    figure.legend(loc="outside upper left", ncols=len(PHASES), frameon=False, labelcolor=INK, fontsize=9)
    style(axes)
    return figure


def spectra(source: KFAC | FisherEstimator) -> Figure:
    """The eigenvalues of the factors of every block in falling order, one panel for every kind of factor.

    A point marks the last eigenvalue above the damping of the factor: directions to the right of it are damped more
    than curved. Waits for the device and decomposes every factor once.

    Raises:
        ModuleNotFoundError: without matplotlib.
        TypeError: for another source.
        FactorNotReady: before the first statistics.
    """
    if not isinstance(source, (KFAC, FisherEstimator)):
        raise TypeError(f"spectra takes a kfac_fx.KFAC or a FisherEstimator, and got a {type(source).__name__}")
    estimator = source.estimator if isinstance(source, KFAC) else source
    by_factor = eigenvalues(estimator)
    order = [str(block.registration) for block in estimator.blocks.values()]
    figure = new_figure(3.6, width=4.2 * len(by_factor) + 1.4)
    panels = figure.subplots(1, len(by_factor), squeeze=False)[0]
    from matplotlib import colormaps

    colors = colormaps["viridis"]
    for axes, (factor, of_blocks) in zip(panels, by_factor.items(), strict=True):
        for name, (values, damping) in sorted(of_blocks.items(), key=lambda item: order.index(item[0])):
            place = order.index(name) / max(1, len(order) - 1)
            color = colors(0.9 * place)
            axes.plot(range(1, len(values) + 1), values, color=color, linewidth=1.2, label=name)
            above = int((values > damping).sum())
            if above:
                axes.plot(above, values[above - 1], "o", color=color, markersize=4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        largest = max((float(values[0]) for values, _ in of_blocks.values()), default=1.0)
        smallest = min(float(values[-1]) for values, _ in of_blocks.values())
        if largest > 0:
            axes.set_ylim(max(LOWEST * largest, smallest / 2), 2 * largest)
        axes.set_title(f"factor {factor}", loc="left", color=INK, fontweight="bold")
        axes.set_xlabel("number of the eigenvalue", color=SOFT)
        style(axes)
    panels[0].set_ylabel("eigenvalue", color=SOFT)
    if len(order) <= NAMED:
        lines = {text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        names = [name for name in order if name in lines]
        handles = [lines[name] for name in names]
        figure.legend(handles, names, loc="outside right upper", frameon=False, labelcolor=INK, fontsize=8)
    else:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap

        scale = ListedColormap([colors(0.9 * step / 255) for step in range(256)])
        bar = figure.colorbar(ScalarMappable(cmap=scale), ax=list(panels), ticks=[0, 1], aspect=30)
        bar.ax.set_yticklabels([order[0], order[-1]], fontsize=8, color=INK)
        bar.outline.set_visible(False)
    return figure


@torch.no_grad()
def eigenvalues(estimator: FisherEstimator) -> dict[str, dict[str, tuple[Tensor, float]]]:
    """By factor and block: the eigenvalues in falling order, of all groups together, and their mean damping."""
    result: dict[str, dict[str, tuple[Tensor, float]]] = {}
    with full_precision():
        for group in estimator.groups:
            group.check_updated()
            dampings = group.split_damping()
            for side in group.sides:
                values, _ = group.side_eigensystem(side)
                of_blocks = zip(group.registrations, values.flatten(1).cpu(), dampings[side].flatten(1), strict=True)
                for registration, row, damping in of_blocks:
                    if bool(row.isfinite().all()):  # a block without statistics has none
                        falling = row.sort(descending=True).values.double()
                        result.setdefault(side.factor, {})[str(registration)] = falling, float(damping.mean())
    return {factor: result[factor] for factor in sorted(result)}


def read_steps(history: History) -> list[int]:
    if not len(history):
        raise ValueError(EMPTY)
    return history.steps


def new_figure(height: float, width: float = 7.0) -> Figure:
    """A figure that no window shows; notebooks draw it, and `savefig` writes it."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("kfac_fx.plot needs matplotlib: pip install 'kfac_fx[plot]'", name="matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style(axes: Axes) -> None:
    """A quiet frame: two lines, soft numbers, a horizontal grid."""
    axes.tick_params(colors=SOFT, labelsize=9)
    axes.grid(axis="y", color="#e6e9ed", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bfc8")
