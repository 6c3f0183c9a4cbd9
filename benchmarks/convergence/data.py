"""The data of the tasks: sets that ship with scikit-learn or Python, and sets that a fixed seed generates."""

from __future__ import annotations

import functools
import pydoc_data.topics
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # the tokens of the texts; other characters are left out
HELD_OUT = 0.2  # the part of every set that is kept for validation


@dataclass(frozen=True)
class Cases:
    """Inputs and targets along dimension 0, divided into a training set and a validation set."""

    inputs: Tensor
    targets: Tensor
    held_inputs: Tensor
    held_targets: Tensor

    def of(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs[chosen], self.targets[chosen]


def divided(inputs: Tensor, targets: Tensor) -> Cases:
    """The cases in a fixed random order, the first of them for validation."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    held, kept = order.split([round(HELD_OUT * len(order)), len(order) - round(HELD_OUT * len(order))])
    return Cases(inputs[kept], targets[kept], inputs[held], targets[held])


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """1,797 images of handwritten digits, [N, 8, 8] with 17 intensities, and what they show. Needs scikit-learn."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.int64).view(-1, 8, 8), torch.tensor(labels, dtype=torch.int64)


@functools.cache
def waves(cases: int = 5000, classes: int = 10, length: int = 40) -> Cases:
    """Noisy one-dimensional shapes [N, length] of ten classes, in the manner of MNIST-1D (Greydanus 2020).

    Every class is a smooth random template of 12 points. A case is its template at a random place in zeros, scaled,
    sheared, shifted around the end, disturbed by smooth noise, resampled to `length` points and disturbed by white
    noise. The set is normalized to mean 0 and variance 1.
    """
    generator = torch.Generator().manual_seed(0)
    random = functools.partial(torch.randn, generator=generator)

    def smooth(rows: int, points: int, width: int) -> Tensor:
        kernel = torch.hann_window(width + 2, periodic=False)[1:-1].view(1, 1, -1)
        return F.conv1d(random(rows, 1, points + width - 1), kernel / kernel.norm()).squeeze(1)

    templates, labels = smooth(classes, 12, 5), torch.randint(classes, (cases,), generator=generator)
    padded = F.pad(templates[labels], (0, 60))  # [N, 72]
    start = torch.randint(60, (cases, 1), generator=generator)
    places = torch.arange(72)
    x = padded.gather(1, (places - start) % 72)
    x = x * (1 + 0.4 * random(cases, 1))
    x = x + 0.25 * smooth(cases, 72, 12)
    x = x + 0.5 * random(cases, 1) * torch.linspace(-1, 1, 72)
    x = F.interpolate(x.unsqueeze(1), length, mode="linear").squeeze(1) + 0.02 * random(cases, length)
    return divided((x - x.mean()) / x.std(), labels)


@functools.cache
def sums(cases: int = 5000, length: int = 24) -> Cases:
    """The adding problem (Hochreiter & Schmidhuber 1997): [N, length, 2] numbers and two marks; the sum of the marked.

    Answering with the mean of the targets, 1, costs 1/6 in the mean square.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(cases, length, generator=generator)
    first = torch.randint(length // 2, (cases, 1), generator=generator)
    second = torch.randint(length // 2, length, (cases, 1), generator=generator)
    marks = torch.zeros(cases, length).scatter_(1, torch.cat((first, second), 1), 1.0)
    return divided(torch.stack((numbers, marks), -1), (numbers * marks).sum(1, keepdim=True))


def tokens(text: str) -> Tensor:
    """The characters of a text as whole numbers, without those that are no token."""
    index = {character: number for number, character in enumerate(CHARACTERS)}
    return torch.tensor([index[character] for character in text if character in index])


@functools.cache
def code(characters: int = 500_000) -> Tensor:
    """The source of Python's standard library: the modules of its top folder by name, as tokens."""
    text, read = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        text.append(path.read_text(encoding="utf-8", errors="ignore"))
        read += len(text[-1])
        if read >= characters:
            break
    return tokens("".join(text))[:characters]


@functools.cache
def prose(characters: int = 300_000) -> Tensor:
    """Python's manual, as `help()` prints it, as tokens."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return tokens(text)[:characters]


def windows(text: Tensor, length: int) -> Cases:
    """Consecutive windows of a text and, as targets, the same windows one token later; the last ones are held out."""
    count = (len(text) - 1) // length
    inputs, targets = text[: count * length].view(count, length), text[1 : count * length + 1].view(count, length)
    held = round(HELD_OUT * count)
    return Cases(inputs[:-held], targets[:-held], inputs[-held:], targets[-held:])
