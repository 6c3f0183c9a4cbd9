"""`Metrics`: numbers of a training run with `KFAC`, for a dict, TensorBoard or the logger of a trainer."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kfac_fx.fisher.block import key_text
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.matrices import dense, full_precision
from kfac_fx.linalg.processes import shard
from kfac_fx.optim.groups import rule_state
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.passes.approximations import Side
from kfac_fx.passes.matrix import precise, real_numbers

Write = Callable[[Mapping[str, float], int], object]
WRITTEN = "write(values, step), as in write=lambda values, step: numbers.update(values) for a dict"
SHOWN = 8  # values in a text
CONDITION = ("largest", "each", None)


class Metrics:
    """Numbers of every n-th step of a KFAC, as a flat dict of floats.

        metrics = kfac_fx.Metrics(optimizer, write=kfac_fx.Metrics.to_tensorboard(writer), every=50)

    | Name | Value |
    |---|---|
    | `damping` | that of the optimizer; rules that have none, such as the default, have no such value |
    | `rho`, `predicted_change` | those of the optimizer, from the first measured step on |
    | `multiplier` | m, which the default finds |
    | `qmodel_learning_rate`, `qmodel_momentum` | those of the optimizer, of the "qmodel" types only |
    | `kappa` | κ, by which `norm_constraint` shortened the step, 1 within the bound; only with a `norm_constraint` |
    | `lr/0`, `lr/1`, ... | the learning rates of the parameter groups |
    | `norm/gradient`, `norm/update` | norms of the gradient and of the change of the parameters, or of their shards |
    | `skipped/steps` | steps so far that changed nothing: undone, not finite, or with gradients of zero |
    | `skipped/undone` | those of them that checks undid, because the loss of their batch had risen |
    | `skipped/statistics` | updates of factors so far that were skipped, over all blocks |
    | `skipped/inverses` | decompositions so far that failed and left a block its earlier inverse |
    | `seconds/record` | a step's forwards that record; the model's own forward counts where it is the recording |
    | `seconds/statistics`, `seconds/inverses` | of a step, to average and to decompose the factors |
    | `seconds/update` | of a step, for the update, checks of the step size, and closures that measure the loss |
    | `memory/factors`, `memory/inverses` | bytes of the factors, and of their inverses or "eigen_moments" |
    | `memory/update` | bytes of the vectors that the update keeps, such as velocities |
    | `condition/A`, `condition/G`, `condition/F` | the largest condition number of the damped factors of that name |

    Seconds are the mean a step since the last values. They are seconds of the host: on an accelerator, those in which
    the work was issued. The condition number is the largest eigenvalue over the smallest one, of the present factor
    with the damping of the last inverses; blocks that have no factors yet do not count. Where a part r of their mean
    eigenvalue damps sides of blocks, 0.003 by default, the number of a side of width d is at most about 1 + d / r. One
    near this bound is usual, because most of a factor lies along the mean of its rows. A damping λ gives no bound.

    Reading waits for the device, so it happens on every n-th step only. Such a step also copies the parameters, and
    decomposes every factor once into eigenvalues and eigenvectors, which costs more than the inverses: choose `every`
    several times `invert_every`, or `condition=None`. On other steps nothing is computed or read but the host's clock.
    The training is the same, bit for bit, with and without.

    Attributes:
        values: the last values, by name; empty before the first.
        step: the number of steps at that time, those of the burn-in included; 0 before.
    """

    def __init__(
        self, optimizer: KFAC, write: Write | None = None, *, every: int = 100, condition: str | None = "largest"
    ) -> None:
        """
        Args:
            optimizer: the KFAC itself, also where a trainer wraps it.
            write: called as write(values, step) inside `optimizer.step`, after the update. Its exceptions leave
                `step`. None: only `values` is kept.
            every: the values are read after the steps `every`, 2 `every`, ..., counted as in `step`.
            condition: "largest" of all blocks; "each" for `condition/<parameters>/<factor>` as well, which is NaN for a
                block that has no factors yet; None for none.

        Raises:
            TypeError: for another optimizer.
            ValueError: for a wrong argument; names all that are wrong.
        """
        if not isinstance(optimizer, KFAC):
            inner = " Where a trainer wraps the optimizer, pass the KFAC that you gave it."
            raise TypeError(f"Metrics takes a kfac_fx.KFAC, and got a {type(optimizer).__name__}.{inner}")
        wrong = []
        if write is not None and not callable(write):
            wrong.append(
                f"write is called as write(values, step), and a {type(write).__name__} cannot be called: for a "
                "SummaryWriter write Metrics.to_tensorboard(writer), for a logging.Logger Metrics.to_logger(logger)"
            )
        elif write is not None and not takes_two(write):
            wrong.append(f"write does not take the two arguments of {WRITTEN}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            wrong.append(f"every must be a positive integer, got {every!r}")
        if condition not in CONDITION:
            wrong.append(f"condition must be 'largest', 'each' or None, got {condition!r}")
        if wrong:
            raise ValueError("; ".join(wrong))
        self.optimizer, self.write, self.every, self.condition = optimizer, write, every, condition
        self.values: dict[str, float] = {}
        self.step = 0
        self._before: list[tuple[Tensor, Tensor]] | None = None  # parameters and their copies, in a step that is read
        self._seconds = dict(optimizer.phases.totals)  # at the last values
        self._steps = 0  # since the last values
        optimizer.phases.readers += 1
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def detach(self) -> None:
        """Remove the hooks; `values` stays. A second call does nothing."""
        if self._hooks:
            self.optimizer.phases.readers -= 1
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __repr__(self) -> str:
        """`Metrics(step 200: lr/0 1, norm/gradient 0.0312, ...)`: the last values, and the number of those left out."""
        if not self.values:
            return f"Metrics(no values before step {self.every})"
        shown = [f"{name} {value:.3g}" for name, value in [*self.values.items()][:SHOWN]]
        more = len(self.values) - len(shown)
        return f"Metrics(step {self.step}: {', '.join(shown)}{f', and {more} more in .values' if more > 0 else ''})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    # --- writers ------------------------------------------------------------------------------------------------------

    @staticmethod
    def to_tensorboard(writer: Any) -> Write:
        """Write by `writer.add_scalar(name, value, step)`, as of torch.utils.tensorboard.SummaryWriter."""

        def write(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return write

    @staticmethod
    def to_logger(logger: logging.Logger, level: int = logging.INFO) -> Write:
        """Write one line per step to a logger of Python's `logging`."""

        def write(values: Mapping[str, float], step: int) -> None:
            logger.log(level, "step %d: %s", step, ", ".join(f"{name} {value:.4g}" for name, value in values.items()))

        return write

    # --- hooks --------------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> int:
        return self.optimizer.counter + self.optimizer.burned_in

    @torch.no_grad()
    def _before_step(self, *_: object) -> None:
        self._before = None
        if (self._now + 1) % self.every == 0:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            self._before = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        self._steps += 1
        if self._before is None:
            return
        before, self._before = self._before, None
        values = self._read(before)
        self.values, self.step = {name: float(value) for name, value in values.items()}, self._now
        if self.write is None:
            return
        try:
            self.write(self.values, self.step)
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is None:  # of the call itself, as of functions without a signature
                error.add_note(f"Metrics calls its second argument, {WRITTEN}.")
            raise

    def _read(self, before: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor | float]:
        optimizer, groups = self.optimizer, self.optimizer.estimator.kept
        values: dict[str, Tensor | float] = {**optimizer.standing}
        values |= {f"lr/{n}": group["lr"] for n, group in enumerate(optimizer.param_groups)}
        gradients = [dense(shard(parameter.grad)) for parameter, _ in before if parameter.grad is not None]
        pairs = [(real_numbers(shard(parameter)), real_numbers(shard(old))) for parameter, old in before]
        values["norm/gradient"] = norm(map(real_numbers, gradients))
        values["norm/update"] = norm(precise(parameter) - precise(old) for parameter, old in pairs)
        values["skipped/steps"] = optimizer.skipped
        values["skipped/undone"] = optimizer.undone
        values["skipped/statistics"] = sum(int(group.skipped.sum()) for group in groups)
        values["skipped/inverses"] = sum(int(group.failed.sum()) for group in groups)
        totals = dict(optimizer.phases.totals)
        values |= {f"seconds/{phase}": (totals[phase] - self._seconds[phase]) / self._steps for phase in totals}
        self._seconds, self._steps = totals, 0
        stacks = [stack for group in groups for stack in group.factors.values()]
        values["memory/factors"] = sum(stack.moment.nbytes + stack.total_weight.nbytes for stack in stacks)
        roots = [operator for group in groups for operators in group.roots.values() for operator in operators]
        extras = [tensor for group in groups for tensor in group.extras.values()]
        values["memory/inverses"] = sum(tensor.nbytes for tensor in (*roots, *extras))
        kept = [tensor for state in optimizer.state.values() for tensor in rule_state(state).values()]
        values["memory/update"] = sum(shard(tensor).nbytes for tensor in kept)
        whole = [group for group in groups if not group.divided]
        return values if self.condition is None else values | self._conditions(whole)

    def _conditions(self, groups: Iterable[BlockGroup]) -> dict[str, Tensor | float]:
        by_factor: dict[str, list[float]] = {}
        each: dict[str, Tensor | float] = {}
        for group in groups:
            for side, numbers in condition_numbers(group).items():
                for registration, number in zip(group.registrations, numbers.tolist(), strict=True):
                    each[f"condition/{key_text(registration.parameters)}/{side}"] = number
                    by_factor.setdefault(f"condition/{side.factor}", []).append(number)
        largest: dict[str, Tensor | float] = {
            name: max((number for number in numbers if not math.isnan(number)), default=math.nan)
            for name, numbers in by_factor.items()
        }
        return largest if self.condition == "largest" else largest | each


def takes_two(write: Write) -> bool:
    """Whether it can be called as write(values, step), as far as its signature tells."""
    try:
        inspect.signature(write).bind({}, 0)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of all, in float32 at least. Waits for the device."""
    norms = [float(torch.linalg.vector_norm(precise(tensor))) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64)))


def condition_numbers(group: BlockGroup) -> dict[Side, Tensor]:
    """The condition numbers of the damped sides of all blocks, [L] each; the largest, where a block has groups."""
    with full_precision():
        dampings = group.split_damping()
        numbers: dict[Side, Tensor] = {}
        for side in group.sides:
            eigenvalues, _ = group.side_eigensystem(side)
            # The diagonal blocks of a wide side have one damping.
            damping = dampings[side].reshape(*eigenvalues.shape[:2], -1)[..., :1]
            damped = eigenvalues + damping
            numbers[side] = (damped.amax(-1) / damped.amin(-1)).amax(-1)
        return numbers
