"""The pictures of docs/gallery.md: `python -m docs.gallery` runs the examples that train, and draws their losses.

Every loss that a training differentiates is a point, in the order of the steps of its optimizer. No example knows of
it: torch calls a function behind every step, and `Tensor.backward` is watched.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import kfac_fx
from kfac_fx.optim.plot import INK, SOFT

IMAGES = Path(__file__).parent / "images" / "gallery"
NAMES = (
    "convolution", "deep_network", "gpt", "lora", "own_layer", "own_rule", "pinn", "recurrent", "shared_weights",
    "tied_autoencoder",
)  # fmt: skip
OURS, OTHERS = "#1d4f91", ("#d9822b", "#8a8f98", "#7a9a3a", "#b0508f", "#3fa58f")
SMOOTHED = 10  # steps of the mean that is drawn over the noisy losses

Curves = dict[str, list[float]]  # the name of an optimizer and its rate -> its losses


@contextlib.contextmanager
def watched() -> Iterator[Curves]:
    """The losses of all optimizers that step inside."""
    curves: Curves = {}
    names: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
    backward, last = Tensor.backward, [float("nan")]

    def noting(self: Tensor, *args: Any, **kwargs: Any) -> None:
        last[0] = float(self.detach())
        backward(self, *args, **kwargs)

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in names:
            ours = isinstance(optimizer, kfac_fx.KFAC)
            name = "K-FAC" if ours else f"{type(optimizer).__name__}, lr {optimizer.defaults['lr']:g}"
            names[optimizer] = name if name not in curves else f"{name} {sum(n.startswith(name) for n in curves) + 1}"
        curves.setdefault(names[optimizer], []).append(last[0])

    hook = register_optimizer_step_post_hook(stepped)
    Tensor.backward = noting  # type: ignore[method-assign]
    try:
        yield curves
    finally:
        Tensor.backward = backward  # type: ignore[method-assign]
        hook.remove()


def draw(name: str, curves: Curves) -> None:
    figure = Figure(figsize=(4.8, 2.7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    others = iter(OTHERS)
    for label, losses in curves.items():
        ours = label.startswith("K-FAC")
        window = min(SMOOTHED, max(1, len(losses) // 10))
        means = torch.tensor(losses).unfold(0, window, 1).mean(-1)
        color = OURS if ours else next(others)
        repeated = ours and label != "K-FAC"  # another seed, or another approximation
        shown = {"lw": 2.0 if ours else 1.3, "alpha": 0.5 if repeated else 1.0, "label": None if repeated else label}
        axes.plot(range(window, len(losses) + 1), means, color, **shown)
    axes.set_yscale("log")
    axes.set_xlabel("steps", color=SOFT)
    axes.set_ylabel("training loss", color=SOFT)
    axes.set_title(name, loc="left", color=INK, fontweight="bold")
    axes.legend(frameon=False, labelcolor=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=SOFT)
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / f"{name}.png", format="png")


def main(names: tuple[str, ...] = NAMES) -> None:
    for name in names:
        module = importlib.import_module(f"examples.{name}")
        with watched() as curves, contextlib.redirect_stdout(io.StringIO()):
            module.main()
        draw(name, curves)
        print(f"{name}: {', '.join(f'{label} {len(losses)} steps' for label, losses in curves.items())}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    main(tuple(parser.parse_args().names))
