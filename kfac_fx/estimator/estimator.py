"""The Fisher matrix of a compiled module, estimated batch by batch, and the batch that is taken into it next.

Statistics are sums over cases, so those of a whole batch are the sums over its micro-batches and over processes, and
only these are sent.

**Early sums**: sums of a batch that travel to their owners in the backward that makes them.

The dense sums of large models take more memory than a process has beside its activations. With owners, a process that
does not own a block therefore drops its sums as soon as they are sent. As DistributedDataParallel does with gradients,
messages leave in an order that all processes know, whatever the order of their backwards is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor

from kfac_fx.compiled.compiled_module import CompiledModule, arguments_of_call, compiled_collection, refuse_batch
from kfac_fx.compiled.layer_collection import LayerCollection
from kfac_fx.compiled.names import check_variables, refuse_other_variables
from kfac_fx.estimator.model_spectrum import ModelSpectrum
from kfac_fx.fisher.block import BlockDiagonalFisher, BlockOperator, key_text
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.fisher.placement import BlockOwners, DividedGroup
from kfac_fx.fisher.spectrum import Damping
from kfac_fx.linalg.arguments import (
    a_flag,
    a_precision,
    a_process_group,
    a_seed,
    a_share,
    a_weight,
    explains_calls,
    finite_numbers,
    generator_fault,
    not_negative,
    optional,
    positive,
    whole_number,
    wrong_kind,
    wrong_value,
)
from kfac_fx.linalg.matrices import (
    Root,
    all_true,
    at_least_float32,
    full_precision,
    pack_symmetric,
    unpack_symmetric,
)
from kfac_fx.linalg.processes import WHOLE_OUTPUTS, Replicas, is_sharded, scattered
from kfac_fx.losses.distributions import check_mode, is_exact
from kfac_fx.passes.approximations import Approximation, named
from kfac_fx.passes.errors import FactorNotReady, ModelChangedError
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import real_parameters
from kfac_fx.passes.torch_private import class_of
from kfac_fx.recording.case_gradients import has_products_of_cases
from kfac_fx.recording.equivalence import OutputWatch
from kfac_fx.recording.model_checks import (
    refuse_inference_mode,
    refuse_untrained,
    refuse_without_blocks,
    refuse_wrapped,
)
from kfac_fx.recording.statistics import Key, Moments, additive, of_loss_times

EARLY = 1 << 30  # bytes of the dense sums of a batch, from which on they travel in the backward
BUCKET = 1 << 28  # bytes of the sums that travel together
Entry = tuple[Key, str]  # a registration, and the name of one of its sums


def dense_sums(registration: Registration) -> list[str]:
    """The names of the symmetric sums of a registration that its backward makes as they are."""
    if registration.generic or any(use.transposed for use in registration.uses):
        return []
    recorded = {statistic.name for statistic in registration.statistics}
    names = [side.statistic.whole.name for side in registration.structure.sides if not side.diagonal]
    return [name for name in names if name in recorded]


@dataclass(eq=False)
class EarlySums:
    """The dense sums of one recording.

    Attributes:
        blocks: those with owners whose sums are recorded, by registration.
        totals: the sums over processes that this process owns.
    """

    blocks: Mapping[Key, BlockOperator]
    owners: BlockOwners
    like: Tensor  # of the device and the dtype of sums that the backward does not make
    waiting: dict[Entry, Tensor] = field(default_factory=dict)
    totals: dict[Key, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buckets: list[list[Entry]] = []
        room = 0
        for key in reversed([*self.blocks]):  # about the order of a backward
            for name in dense_sums(self.blocks[key].registration):
                size = self.shape((key, name)).numel() * self.like.element_size()
                if not self.buckets or size > room:
                    self.buckets.append([])
                    room = BUCKET
                self.buckets[-1].append((key, name))
                room -= size
        self.sent = {entry for bucket in self.buckets for entry in bucket}
        self.unsent = self.buckets[::-1]

    @property
    def bytes(self) -> int:
        return sum(self.shape(entry).numel() for entry in self.sent) * self.like.element_size()

    def shape(self, entry: Entry) -> torch.Size:
        key, name = entry
        matrix, _ = self.blocks[key].registration.rows
        return torch.Size(named(name).shape(matrix, 1))

    def take(self, key: Key, name: str, value: Tensor) -> Tensor | None:
        """Called in a backward with a finished sum. Returns zeros without memory that take its place; None for a sum
        that does not travel early."""
        if (key, name) not in self.sent:
            return None
        self.waiting[key, name] = value
        while self.unsent and all(entry in self.waiting for entry in self.unsent[-1]):
            self.send(self.unsent.pop())
        return value.new_zeros(()).expand(value.shape)

    def finish(self) -> None:
        """Send what is left, and zeros for sums that the backward did not make."""
        while self.unsent:
            self.send(self.unsent.pop())

    @torch.no_grad()
    def send(self, bucket: Iterable[Entry]) -> None:
        by_owner: list[list[Tensor]] = [[] for _ in range(self.owners.replicas.number)]
        mine = []
        for entry in bucket:
            group = self.blocks[entry[0]].group
            assert group.owner is not None, f"bug in kfac_fx: {entry[0]} has no owner"
            value = self.waiting.pop(entry, None)
            value = self.like.new_zeros(self.shape(entry)) if value is None else value
            by_owner[group.owner].append(pack_symmetric(value))
            mine += [entry] * group.here
        for (key, name), total in zip(mine, self.owners.reduce(by_owner), strict=True):
            self.totals.setdefault(key, {})[name] = unpack_symmetric(total)


OF_NO_BATCH = (
    "No batch has gone through this net, and the sizes of a batch may give its blocks another form. If the state is of "
    "the same model, give kfac_fx.compile example inputs; or call net.recorder((x,), {}) once, and load the state then."
)
MARKS = 2**12  # of sets of registrations; sums of them over as many processes are exact in float32
Agreed = Callable[[], Mapping[str, str]]  # options as text, by name


class FisherEstimator(BlockDiagonalFisher):
    """A running estimate of the Fisher matrix of `net`'s parameters, the mean over cases.

    est = FisherEstimator(net, damping=1e-3)
    est.update_covariances(x)        # on every batch, or every tenth
    est.update_inverses()            # more rarely
    step = est.multiply_inverse({name: p.grad for name, p in net.named_parameters()})

    Attributes:
        net: the compiled module.
        damping: λ of F + λ I, a 0-d tensor. Writing into it changes the damping.
        newcomers: the registrations to which the last `fold` gave their first factors.
        params_stats: with `compute_params_stats`, by parameter the gradient of the mean loss of the last batch
            ("empirical"); with the other modes, the gradient of what they send back, summed over sources.
    """

    @explains_calls(meant={"mode": "Write estimation_mode=...."})
    def __init__(
        self,
        net: CompiledModule | LayerCollection,
        *,
        variables: Iterable[Any] | None = None,
        cov_ema_decay: float = 0.95,
        damping: float | Tensor = 1e-3,
        exps: Iterable[float] = (-1,),
        estimation_mode: str = "gradients",
        compute_cholesky: bool = False,
        compute_cholesky_inverse: bool = False,
        compute_params_stats: bool = False,
        batch_size: int | None = None,
        fraction: float = 1.0,
        seed: int | None = None,
        memory: int | None = None,
        process_group: Any = None,
        factor_dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            net: a compiled module, or anything with its `registrations`, `named_parameters` and `record`; or a
                LayerCollection, which can then serve no other estimator.
            variables: the names of the parameters to estimate, None for all. Parameters that share a registration must
                be named together. With a LayerCollection: exactly the parameters that must be registered.
            cov_ema_decay: d, by which an update multiplies the weights of all batches before it, from 0 to 1: the
                factors are means of the batches with the weights 1, d, d², ...
            damping: λ of F + λ I. A 0-d tensor is used as it is, so that writing into it changes `est.damping`.
            exps: the powers of F + λ I that `multiply_matpower` needs; 1 is always available.
            estimation_mode: "gradients" samples targets from the model's own distribution (the Fisher), "empirical"
                takes the true ones (the empirical Fisher), "curvature_prop" sends random signs back, "exact" every
                coordinate of the outputs. The last two also with "_GGN", for the generalized Gauss-Newton matrix.
            compute_cholesky, compute_cholesky_inverse: prepare `multiply_cholesky` and its inverse.
            compute_params_stats: compute `params_stats`.
            batch_size: the number of cases of every batch, over all its micro-batches and towers; None: any.
            fraction: the part of every batch that is recorded.
            seed: of the sampled targets and signs; None: torch's own generator.
            memory: bytes that the exact modes may take for a chunk of their sources; None: 1 GiB.
            process_group: of torch.distributed, `group.WORLD` for all. Its processes have parts of one batch and all
                call `update_covariances`. None: this process alone.
            factor_dtype: the precision of the factors and of sums over batches, such as torch.float64 for a model in
                bfloat16; None: that of the parameters, and at least float32.

        Raises ValueError for an unknown mode or a number out of range, RegistrationError for wrong `variables` and if
        the model has no trained parameters.
        """
        # Every argument is checked before the collection is finalized: a wrong one must leave it usable.
        refuse_wrapped(net, "FisherEstimator")
        refuse_inference_mode("a FisherEstimator is created")
        collection = net if isinstance(net, LayerCollection) else None
        if collection is None and not (hasattr(net, "record") and hasattr(net, "named_parameters")):
            written = "net = kfac_fx.compile(model, ...) and FisherEstimator(net)"
            raise wrong_kind("FisherEstimator", "a compiled module", net, written)
        named = dict((net.model if isinstance(net, LayerCollection) else net).named_parameters())
        if variables is not None and collection is None:
            variables = refuse_other_variables(variables, net)
        check_mode(estimation_mode, "estimation_mode")
        refuse_untrained(named.items())
        a_weight("cov_ema_decay", cov_ema_decay)
        a_share("fraction", fraction)
        not_negative("damping", damping)  # the host waits for a tensor, once
        a_flag("compute_cholesky", compute_cholesky)
        a_flag("compute_cholesky_inverse", compute_cholesky_inverse)
        a_flag("compute_params_stats", compute_params_stats)
        optional(whole_number(1, "cases"), "batch_size", batch_size)
        optional(whole_number(1, "bytes"), "memory", memory)
        optional(a_seed, "seed", seed)
        optional(a_process_group, "process_group", process_group)
        roots: list[Root] = sorted(set(finite_numbers("exps", exps)) - {1.0})
        roots += ["cholesky"] * compute_cholesky + ["cholesky_inverse"] * compute_cholesky_inverse
        example = next(
            (parameter for parameter in named.values() if parameter.requires_grad), next(iter(named.values()))
        )
        optional(a_precision, "factor_dtype", factor_dtype)
        if not isinstance(damping, Tensor):
            precision = factor_dtype or at_least_float32(example.dtype)
            damping = torch.full((), float(damping), dtype=precision, device=example.device)
        super().__init__(roots, damping.reshape(()) if damping.dim() else damping)
        self._generator = None if seed is None else torch.Generator(example.device).manual_seed(seed)
        self._pending = PendingBatch()
        self._early: EarlySums | None = None  # of the last recording
        self._options: dict[str, Any] = {"params_stats": True} if compute_params_stats else {}
        self._options |= {} if memory is None else {"memory": memory}
        self._recorded: set[Key] = set()  # the registrations that have factors
        self.newcomers: frozenset[Key] = frozenset()
        # The registrations of the last batch, and shape, dtype and device of their sums, by name.
        self._last: tuple[tuple[Registration, ...] | None, dict[Key, dict[str, tuple[Any, ...]]]] | None = None
        self._followed: tuple[Registration, ...] | None = None  # those of the net when the blocks were compared with it
        self.factor_dtype = factor_dtype
        self.cov_ema_decay = cov_ema_decay
        self.estimation_mode = estimation_mode
        self.fraction = fraction
        self.batch_size = batch_size
        self.replicas = None if process_group is None else Replicas(process_group)
        self.agreed: Agreed | None = None  # makes the options that all processes have, where a fold sends a message
        self.params_stats: dict[str, Tensor] = {}
        self.kept_is_finite: Tensor | None = None  # of the last batch that was kept for a fold; it is left out if False
        self.outputs = OutputWatch()
        self.variables = None if variables is None or collection is not None else frozenset(variables)
        self.net: CompiledModule = compiled_collection(net, variables) if isinstance(net, LayerCollection) else net
        if collection is not None:
            collection.estimator = self

    def wanted(self) -> tuple[tuple[Registration, ...], Mapping[str, Tensor]]:
        """The registrations to estimate, and the parameters by name. Raises ModelChangedError if modules or parameters
        were replaced."""
        structure = self.net.captures.structure if isinstance(self.net, CompiledModule) else None
        if structure is not None and (structure.same or not any(map(is_sharded, self.net.parameters()))):
            structure.check()  # the first recording looks at parameters that were sharded since
        registrations, parameters = self.net.registrations, real_parameters(self.net.named_parameters())
        if self.variables is not None:
            check_variables(self.variables, registrations)
            registrations = tuple(r for r in registrations if r.owners[0] in self.variables)
        refuse_without_blocks(registrations, parameters.items())
        return registrations, parameters

    def update_covariances(
        self, *inputs: Any, targets: Any = None, should_decay: bool = True, fold: bool = True, **kwargs: Any
    ) -> None:
        """Record one batch and average it into all factors.

        Generic parameters take one backward for every example. So do layers that do not depend on the batch, with true
        targets.

        Args:
            inputs, kwargs: the arguments of forward. A batch on the CPU moves to the accelerator of the parameters.
            targets: for "empirical": one a loss, in a list or tuple, or one for all. Where forward computes the loss
                and has an argument of this name, they are that argument.
            should_decay: False gives the past its full weight: a plain average over batches, for a burn-in.
            fold: False keeps the batch for the next `fold()`, which takes all kept batches as one. Over a DataLoader
                this is a mean in which all cases have the same weight, whatever the sizes of the batches.

        Raises ValueError for a batch that is not of `batch_size` cases, ModelChangedError if the model was changed
        after it was compiled.
        """
        with telling_pair(inputs, self.records_in_training):
            moments = self._moments_of(inputs, kwargs, targets)
        self.accumulate(moments, guarded=not fold)
        if fold:
            self.fold(decay=None if should_decay else 1.0)

    def _moments_of(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> Moments:
        """Record one batch. inputs, kwargs, targets: of `update_covariances`."""
        if isinstance(self.net, CompiledModule):
            refuse_batch("estimator.update_covariances", self.net.model, inputs)
            inputs, kwargs, targets = self.net.placed(inputs, *arguments_of_call(self.net, inputs, kwargs, targets))
        differs: Callable[..., Tensor] | None = getattr(self.net, "differs", None)
        compared = differs is not None and self.outputs.due()
        beside = compared and self.fraction == 1.0 and self.net.repeats_recordings
        if differs is not None and compared and not beside:
            self.outputs.add(differs(inputs, kwargs))
        options: dict[str, Any] = {} if self.variables is None else {"only": self.variables}
        of_sources = {"mode": self.estimation_mode, "targets": targets, "fraction": self.fraction}
        of_sources |= {"generator": self._generator}
        before = None if self._generator is None else self._generator.get_state()
        if beside:
            moments, apart = self.net.record_compared(inputs, kwargs, **options, **of_sources, **self._options)
            self.outputs.add(apart)
        else:
            moments = self.net.record(inputs, kwargs, **options, **of_sources, **self._options)
        registrations = self.net.registrations if isinstance(self.net, CompiledModule) else ()
        if any(has_products_of_cases(registration, self.estimation_mode) for registration in registrations):
            with drawn_again(self._generator, before):
                moments = self.net.squared_by_example(moments, inputs, kwargs, **of_sources)
        return moments

    @property
    def records_in_training(self) -> bool:
        """Whether the statistics of a KFAC come from the user's own backward."""
        return self.estimation_mode == "empirical"

    @property
    def recorded(self) -> bool:
        """Whether any batch was recorded; one that is not folded yet counts."""
        return bool(self._pending.sums) or any(group.updated for group in self.groups)

    @torch.no_grad()
    def accumulate(self, moments: Moments, guarded: bool = False, into: PendingBatch | None = None) -> None:
        """Add the moments of a micro-batch to those that the next `fold` takes as one batch.

        Args:
            guarded: leave the micro-batch out if its moments are not finite, and count it in `failures`; else they make
                the sums of the whole batch so, and it is skipped.
            into: a batch that is none of the next `fold` until `take` adds it; None: that of the next `fold`.

        Raises ValueError if registrations are missing in them.
        """
        self.follow_registrations()
        wanted = [moments.only, moments.used]
        due = {key: block for key, block in self.blocks.items() if all(keys is None or key in keys for keys in wanted)}
        lacking = {key: block for key, block in due.items() if key not in moments.statistics}
        paused = {key for key, block in lacking.items() if moments.frozen.issuperset(block.registration.owners)}
        if missing := [key for key in lacking if key not in paused]:
            raise ValueError(f"moments lack {len(missing)} of {len(self.blocks)} registrations, first {missing[0]}.")
        with full_precision():
            recorded: dict[Key, dict[str, Tensor]] = {}
            early, self._early = self._early, None
            batch = self._pending if into is None else into
            for key in (key for key in due if key not in lacking):
                sums = additive(self.blocks[key].registration.structure, moments.statistics[key])
                if early is not None:
                    sums = {name: value for name, value in sums.items() if (key, name) not in early.sent}
                    batch.add_owned(key, early.totals.get(key, {}))
                dtype = self.factor_dtype
                recorded[key] = sums if dtype is None else {name: value.to(dtype) for name, value in sums.items()}
            batch.registrations, batch.multiplied = self._registrations, moments.multiplied
            finite = batch.add(recorded, moments.gradients, moments.cases, paused, guarded, self.damping.device)
        self.kept_is_finite = finite
        if finite is not None and not all_true(finite):
            for block in (due[key] for key in recorded if due[key].group.here):
                block.group.skipped[block.member] += ~finite

    def take(self, batch: PendingBatch) -> None:
        """Add a batch that was accumulated apart to that of the next `fold`, without what has changed since."""
        self.follow_registrations()
        before, now = batch.registrations or (), self._registrations or ()
        if before is not now:
            batch.keep(unchanged(before, now))
        self._pending.join(batch)

    def take_no_cases(self) -> None:
        """Add a batch without cases, if this process has none and the others wait for its sums: zeros of the shapes of
        the last batch."""
        if self._last is None or self.replicas is None or self.replicas.number == 1:
            return
        registrations, shapes = self._last
        sums = {
            key: {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype, device) in of.items()}
            for key, of in shapes.items()
        }
        self.take(PendingBatch(sums, registrations=registrations))

    @contextmanager
    def early_sums(self, mode: str) -> Iterator[Callable[[Key, str, Tensor], Tensor | None] | None]:
        """Around a recording, whose moments `accumulate` gets next: yields its `on_sum`, by which dense sums travel to
        their owners in the backward; None if they do not.

        They do if they take at least `EARLY` bytes, so that all processes need the same number of recordings in a step
        only where memory is short. The exact modes have several backwards, and sums are complete behind the last one.
        """
        if self.owners is None or self.owners.replicas.number == 1 or is_exact(mode):
            yield None
            return
        begun: list[EarlySums] = []

        def on_sum(key: Key, name: str, value: Tensor) -> Tensor | None:
            if not begun:  # not before: the proof on the first batch may change registrations
                begun.append(self.new_early_sums())
            return begun[0].take(key, name, value)

        yield on_sum
        self._early = begun[0] if begun else self.new_early_sums()
        self._early.finish()

    def new_early_sums(self) -> EarlySums:
        assert self.owners is not None, "bug in kfac_fx: sums travel to owners, and there are none"
        self.follow_registrations()
        trained = {name for name, parameter in self.net.named_parameters() if parameter.requires_grad}
        owned = {key: block for key, block in self.blocks.items() if block.group.owner is not None}
        blocks = {key: b for key, b in owned.items() if not trained.isdisjoint(b.registration.owners)}
        sums = EarlySums(blocks, self.owners, self.damping)
        return sums if sums.bytes >= EARLY else EarlySums({}, self.owners, self.damping)

    def pending_rows(self) -> dict[Key, int | Tensor]:
        """The number of rows of every registration in the batches that are not folded yet; of one without rows, that
        of cases."""
        return {key: sums.get("count", self._pending.cases) for key, sums in self._pending.sums.items()}

    def pending_state(self) -> dict[str, Tensor]:
        """The sums that are not folded yet, as tensors by name, and the state of the random stream."""
        generator = {} if self._generator is None else {"generator": self._generator.get_state()}
        return self._pending.state() | generator

    def load_pending(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `pending_state()` of an estimator with the same blocks."""
        self._pending = PendingBatch.of_state(state, self.blocks, self.damping.device)
        if self._generator is not None:
            self._generator.set_state(state["generator"])

    def follow_registrations(self) -> None:
        """Build the blocks anew if the proof on the first batch changed registrations, and extend them if parameters
        were unfrozen, or a call uses parameters that no call used before. Blocks of registrations that changed begin
        without factors."""
        if self._registrations is None or self.net.registrations is self._followed:
            return
        self._followed, now = self.net.registrations, self.wanted()[0]
        before, after = (
            {registration.parameters: registration.approximation for registration in registrations}
            for registrations in (self._registrations, now)
        )
        if before == after:
            return
        if not self._pending.sums and not any(group.updated for group in self.groups):
            self.build()
            return
        self._recorded &= unchanged(now, self._registrations)
        self._pending.keep(unchanged(self._registrations, now))
        self.extend()

    def unrecorded(self) -> frozenset[Key]:
        """The registrations that have no factors yet and are trained at present."""
        self.follow_registrations()
        if not (waiting := self.blocks.keys() - self._recorded):
            return frozenset()
        trained = {name for name, parameter in self.net.named_parameters() if parameter.requires_grad}
        return frozenset(key for key in waiting if not trained.isdisjoint(self.blocks[key].registration.owners))

    def usable(self, expected: bool = False) -> Tensor | None:
        """Whether the accumulated moments are those of the model, 0-dim on the device; None if none were compared.

        expected: other processes may have compared theirs, also if this one has not.

        Raises ModelChangedError, and drops the moments, if the host knows without waiting that they are not.
        """
        differs, model = self.outputs.pending, class_of(getattr(self.net, "model", self.net)).__name__
        try:
            self.outputs.check(model)
            if differs is None and expected and self.replicas is not None and self.replicas.number > 1:
                differs = torch.zeros((), dtype=torch.bool, device=self.damping.device)
            if differs is None:
                return None
            if self.replicas is not None:  # one process must not go on alone
                (total,) = self.replicas.total([differs.to(self.damping.dtype)])
                differs = total > 0
            return self.outputs.take(model, differs)
        except ModelChangedError as error:
            self._pending = PendingBatch()
            if any(is_sharded(parameter) for _, parameter in self.net.named_parameters()):
                raise ModelChangedError(f"{error}\n{WHOLE_OUTPUTS}") from None
            raise

    @torch.no_grad()
    def fold(self, *, decay: float | None = None, weight: float | None = None, accept: Tensor | None = None) -> bool:
        """Average all accumulated moments into all factors, as one batch.

        Args:
            decay: by which the weight of the past is multiplied, from 0 to 1; None for `cov_ema_decay` or, with a
                weight, for 1.
            weight: of the batch, 1 by default: its number of cases, for factors that are means over all cases of a
                stream. est.fold(weight=len(x)) after every chunk, also of another process that has loaded the state,
                makes the factors that one fold of all chunks makes.
            accept: a 0-d bool tensor; where False, the sums are dropped.

        Returns False for a batch without cases, which changes nothing, else True.

        Batches that are not finite are left out and counted in `failures`.

        Raises ValueError for a decay out of range, and for a batch that is not of `batch_size` cases, which is dropped;
        ModelChangedError if the outputs of a recording were not the model's.
        """
        optional(a_weight, "decay", decay)
        optional(positive, "weight", weight)
        if accept is not None and not (isinstance(accept, Tensor) and accept.dtype == torch.bool and not accept.dim()):
            raise wrong_value("accept", accept, "be a 0-dim tensor of torch.bool")
        self.newcomers = frozenset()
        usable = self.usable()
        if not self._pending.sums and not self._pending.paused:
            return True
        if usable is not None:
            accept = usable if accept is None else accept & usable
        if self.batch_size is not None and (recorded := int(self._pending.cases)) != self.batch_size:
            many = "1 case" if recorded == 1 else f"{recorded} cases"
            self._pending = PendingBatch()
            raise ValueError(f"a batch of {many} was recorded, but batch_size={self.batch_size}.")
        if decay is None:
            decay = self.cov_ema_decay if weight is None else 1.0
        pending = self._pending
        pending.keep(pending.sums.keys() - pending.paused)
        groups = {key: self.blocks[key].group for key in pending.sums}
        if self.replicas is not None and self.replicas.number > 1:
            self._last = (
                self._registrations,
                {
                    key: {name: (value.shape, value.dtype, value.device) for name, value in sums.items()}
                    for key, sums in pending.sums.items()
                },
            )
        cases = pending.total(self.replicas, groups, self.damping, self.owners, self.agreed)
        # If it is a tensor, an empty batch counts as one that is not finite.
        empty = isinstance(cases, int) and cases == 0
        if not empty:
            with full_precision():
                for group in self.groups:
                    for members in runs([r.parameters in pending.sums for r in group.registrations]):
                        group.updated = True
                        if not group.here:
                            continue
                        sums = [pending.sums[r.parameters] for r in group.registrations[members]]
                        group.update(
                            sums,
                            cases,
                            decay=decay,
                            weight=1.0 if weight is None else float(weight),
                            by_rows=weight is not None,
                            accept=accept,
                            members=members,
                        )
            self.newcomers = frozenset(pending.sums.keys() - self._recorded)
            self._recorded |= self.newcomers
            self.params_stats = {name: gradient / cases for name, gradient in pending.gradients.items()}
        self._pending = PendingBatch()
        return not empty

    @torch.no_grad()
    def spectrum(
        self,
        *,
        scale: float | Tensor = 1.0,
        damping: Damping | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> ModelSpectrum:
        """s F + δ I by the eigenvectors of the present factors: powers, determinants, diagonals and samples, for any s
        and δ.

        It decomposes all factors once and does not need `update_inverses`. The damping is not split between the sides.
        The result has a copy of the factors for `save_spectrum`, and can also correct its eigenvalues and score
        examples, see `ModelSpectrum`.

        Args:
            scale: s; the number of training cases for the precision of a Laplace approximation.
            damping: δ, see `Spectrum`; None: λ.
            dtype: the precision of the decompositions, such as torch.float64; the results have that of the factors.
                None: that of the factors, and float64 for factors whose decomposition fails.
            device: where they are computed, such as "cpu" for want of memory; None: where the factors are.

        Raises:
            FactorNotReady: there was no first update.
            ValueError: another dtype, or a device that is not there.
            ApproximationError: a series is too wide to be dense.
        """
        self.refuse_frozen()
        systems = self._systems(dtype, device)
        damping = self.damping.clone() if damping is None else damping
        shapes, mode = self._shapes, self.estimation_mode
        return ModelSpectrum(systems, shapes, scale, damping, net=self.net, mode=mode, replicas=self.replicas)

    def refuse_frozen(self) -> None:
        """Raises FactorNotReady if blocks have no factors because their parameters are frozen, and others have some."""
        frozen = {name for name, parameter in self.net.named_parameters() if not parameter.requires_grad}
        waiting = [b.registration for key, b in self.blocks.items() if key not in self._recorded]
        names = [
            name for registration in waiting for name in registration.owners if frozen.issuperset(registration.owners)
        ]
        if self._recorded and names:
            raise frozen_after(names)

    def state_dict(self) -> dict[str, Tensor]:
        """The factors and counters; see `BlockDiagonalFisher`. With a seed, also the state of the random stream."""
        generator = {} if self._generator is None else {"generator": self._generator.get_state()}
        return super().state_dict() | generator

    def state_faults(
        self, state: Mapping[str, object], others: Mapping[str, Tensor] = MappingProxyType({})
    ) -> tuple[list[tuple[str, str]], str]:
        rows, hint = super().state_faults(state, others)
        if self._generator is not None and "generator" not in dict(rows):
            wrong = generator_fault(cast(Tensor, state["generator"]), self._generator.device)
            rows += [] if wrong is None else [("generator", wrong)]
        if any("/" in name for name, _ in rows) and isinstance(self.net, CompiledModule):
            hint += "" if self.net.captures.recorders else OF_NO_BATCH
        return rows, hint

    def load_checked(self, state: Mapping[str, Tensor]) -> None:
        """Batches that are not folded yet are forgotten."""
        super().load_checked(state)
        self._pending = PendingBatch()
        self._recorded = {key for key, block in self.blocks.items() if block.has_factors}
        if self._generator is not None:
            self._generator.set_state(state["generator"].cpu())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "FisherEstimator objects cannot be copied or pickled. Create one for the other net and call "
            "load_state_dict(est.state_dict())."
        )


@contextmanager
def drawn_again(generator: torch.Generator | None, before: Tensor | None) -> Iterator[None]:
    """Inside, a generator has the state of before, and so draws the same numbers; behind it goes on."""
    if generator is None or before is None:
        yield
        return
    after = generator.get_state()
    generator.set_state(before)
    try:
        yield
    finally:
        generator.set_state(after)


@contextmanager
def telling_pair(inputs: Sequence[Any], true_targets: bool) -> Iterator[None]:
    """Adds to the error of a batch in one tuple what to write instead, where forward does not take it.

    true_targets: the mode needs them.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if len(inputs) == 1 and isinstance(inputs[0], (tuple, list)):
            alone = "" if true_targets else "update_covariances(x), because this mode draws targets, or "
            error.add_note(
                f"update_covariances takes the arguments of forward, and got a {type(inputs[0]).__name__} of "
                f"{len(inputs[0])}. If this is a batch (x, y), write {alone}update_covariances(x, targets=y)."
            )
        raise


def frozen_after(names: Iterable[str]) -> FactorNotReady:
    """The error for blocks without factors, because these parameters are frozen."""
    return FactorNotReady(
        f"{', '.join(names)} were frozen after the model was compiled, so nothing is recorded of them, and their "
        "blocks have no factors. Compile the model again with the parameters frozen; or let them require a "
        "gradient while batches are recorded."
    )


def unchanged(before: Iterable[Registration], now: Iterable[Registration]) -> set[Key]:
    """The registrations that are the same as before."""
    was, is_now = ({r.parameters: r.approximation for r in registrations} for registrations in (before, now))
    return {key for key in was if was[key] == is_now.get(key)}


def runs(flags: Sequence[bool]) -> list[slice]:
    """The runs of true flags."""
    ends = [n for n in range(len(flags) + 1) if (n and flags[n - 1]) != (n < len(flags) and flags[n])]
    return [slice(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True)]


# --- the batch that is taken next -------------------------------------------------------------------------------------


@dataclass
class PendingBatch:
    """The batch that the next fold takes, or a part of it.

    Attributes:
        sums: the sums of every recorded registration, by name.
        gradients: the gradients of parameters, if they are asked for.
        cases: the number of cases.
        lost: among these, the cases of micro-batches that were not finite and left out.
        paused: the registrations that were frozen in a micro-batch.
        registrations: those of which there were blocks when it was recorded.
        owned: among the sums of the blocks that this process owns, those that are summed over processes already. They
            are not in `sums`.
        multiplied: see `Moments`; of all micro-batches.
    """

    sums: dict[Key, dict[str, Tensor]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    cases: int | Tensor = 0
    lost: int | Tensor = 0
    paused: set[Key] = field(default_factory=set)
    registrations: tuple[Registration, ...] | None = None
    owned: dict[Key, dict[str, Tensor]] = field(default_factory=dict)
    multiplied: int | Tensor | None = None

    def copy(self) -> PendingBatch:
        """As it is now, whatever is added to this one later."""
        return replace(
            self, sums=dict(self.sums), gradients=dict(self.gradients), paused=set(self.paused), owned=dict(self.owned)
        )

    def state(self) -> dict[str, Tensor]:
        """Its sums and numbers as tensors by name, without gradients."""
        state = {f"{key_text(key)}/{name}": value for key, sums in self.sums.items() for name, value in sums.items()}
        numbers = {name: torch.as_tensor(getattr(self, name)) for name in ("cases", "lost")}
        return state | numbers | {f"paused {key_text(key)}": torch.ones(()) for key in self.paused}

    @staticmethod
    def of_state(state: Mapping[str, Tensor], keys: Iterable[Key], device: torch.device) -> PendingBatch:
        """The inverse of `state`. keys: of all blocks. device: of the sums."""
        pending, by_text = PendingBatch(), {key_text(key): key for key in keys}
        pending.cases, pending.lost = (state[name].to(device) for name in ("cases", "lost"))
        pending.paused = {key for text, key in by_text.items() if f"paused {text}" in state}
        for name, value in state.items():
            text, slash, of_sum = name.rpartition("/")
            if slash:
                pending.sums.setdefault(by_text[text], {})[of_sum] = value.to(device)
        return pending

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget the sums of all registrations but these."""
        kept = set(keys)
        self.sums = {key: sums for key, sums in self.sums.items() if key in kept}
        self.owned = {key: sums for key, sums in self.owned.items() if key in kept}

    def add_owned(self, key: Key, totals: Mapping[str, Tensor]) -> None:
        """Add sums over processes of a micro-batch."""
        before = self.owned.get(key)
        self.owned[key] = dict(totals) if before is None else {name: before[name] + totals[name] for name in totals}

    def add(
        self,
        recorded: Mapping[Key, dict[str, Tensor]],
        gradients: Mapping[str, Tensor],
        cases: int | Tensor,
        paused: Iterable[Key],
        guarded: bool,
        device: torch.device,
    ) -> Tensor | None:
        """Add a micro-batch.

        Args:
            guarded: leave it out if it is not finite.
            device: of the answer.

        Returns:
            Whether a guarded micro-batch is finite, 0-dim on the device; None for one that is not guarded.
        """
        finite, lost = None, cast(int | Tensor, 0)
        if guarded and recorded:
            each = [value for sums in (*recorded.values(), gradients) for value in sums.values()]
            finite = torch.stack([value.sum().to(device) for value in each]).isfinite().all()
            if not all_true(finite):
                recorded = {key: only_where(finite, sums) for key, sums in recorded.items()}
                gradients = only_where(finite, gradients)
            lost = torch.where(finite, 0, cases)
        self.join(PendingBatch(dict(recorded), dict(gradients), cases, lost, set(paused)))
        return finite

    def join(self, other: PendingBatch) -> None:
        """Add the micro-batches of another one."""
        for key, sums in other.sums.items():
            before = self.sums.get(key)
            self.sums[key] = sums if before is None else {name: before[name] + sums[name] for name in sums}
        for name, gradient in other.gradients.items():
            self.gradients[name] = gradient + self.gradients[name] if name in self.gradients else gradient
        for key, totals in other.owned.items():
            self.add_owned(key, totals)
        self.cases, self.lost = plus(self.cases, other.cases), plus(self.lost, other.lost)
        self.paused |= other.paused
        self.registrations = other.registrations or self.registrations
        self.multiplied = self.multiplied if other.multiplied is None else other.multiplied

    def total(
        self,
        replicas: Replicas | None,
        groups: Mapping[Key, BlockGroup],
        damping: Tensor,
        owners: BlockOwners | None = None,
        agreed: Agreed | None = None,
    ) -> int | Tensor:
        """Add all sums up over the processes, or over those of each owner at the owner. Returns the number of cases.

        The loss whose gradients a training averages over processes is the mean of theirs. Its statistics have gradients
        that are multiplied by the cases of all processes, divided by the number of these, and not by their own.

        Messages have at most `BUCKET` bytes, and the sums of a message that other processes own are dropped behind it.

        Args:
            groups: the group of blocks of every registration that has sums.
            damping: its device and at least its precision are those of the number of cases.
            owners: of the blocks; None: every process keeps all.
            agreed: see `FisherEstimator.agreed`.

        Raises ValueError if the processes have other options in `agreed`; ModelChangedError on a CPU if they have sums
        of other registrations than this one.
        """
        if replicas is None or replicas.number == 1:
            return self.cases - self.lost
        of_gradients = replicas.total(list(self.gradients.values()))
        self.gradients = dict(zip(self.gradients, of_gradients, strict=True))
        dtypes = [tensor.dtype for sums in self.sums.values() for tensor in sums.values()]
        precise = functools.reduce(torch.promote_types, dtypes[:1], damping.dtype)
        here = torch.as_tensor(self.cases - self.lost, dtype=precise, device=damping.device)
        options = {} if agreed is None else agreed()
        texts = " ".join(map(key_text, groups)), str(options)
        of_paths, of_options = (crc32(text.encode()) % MARKS for text in texts)
        mark = here.new_tensor(of_paths)
        cases, marks, of_all = replicas.total([here, mark, here.new_tensor(of_options)])
        if options and bool(of_all != of_options * replicas.number):
            replicas.check_options(options)
        if damping.device.type == "cpu" and bool(marks != mark * replicas.number):
            raise ModelChangedError(
                "the processes of a step took different paths through the model, so their statistics are those of "
                f"other parameters. This one used {', '.join(map(key_text, groups))}.\n"
                "Let the argument, the attribute or the random number that chooses a path be the same in all."
            )
        if self.multiplied is not None:
            own = torch.as_tensor(self.multiplied, dtype=precise, device=damping.device)
            scale = torch.where(own > 0, cases / (replicas.number * own), 1.0)
            self.sums = {key: of_loss_times(sums, scale) for key, sums in self.sums.items()}
        parts = {key: group for key, group in groups.items() if isinstance(group, DividedGroup)}
        whole = {key: group for key, group in groups.items() if key not in parts}
        for members in self.buckets(whole):
            messages = {
                key: with_symmetric(group.structure, self.sums[key], pack_symmetric) for key, group in members.items()
            }
            if owners is None:
                totals = iter(replicas.total([tensor for sums in messages.values() for tensor in sums.values()]))
            else:
                by_owner: list[list[Tensor]] = [[] for _ in range(owners.replicas.number)]
                for key, group in members.items():
                    assert group.owner is not None, f"bug in kfac_fx: {key} has no owner"
                    by_owner[group.owner] += messages[key].values()
                totals = iter(owners.reduce(by_owner))
            for key, group in members.items():
                sums = {name: next(totals) for name in messages[key]} if group.here else {}
                self.sums[key] = with_symmetric(group.structure, sums, unpack_symmetric) | self.owned.pop(key, {})
        if parts and owners is not None:
            with replicas.exchanging("statistics"):
                self.scatter(parts, owners)
        return cases

    def buckets(self, groups: Mapping[Key, BlockGroup]) -> Iterator[dict[Key, BlockGroup]]:
        """The registrations whose sums travel together, those of an owner next to each other."""
        bucket: dict[Key, BlockGroup] = {}
        room = BUCKET
        for key in sorted(groups, key=lambda key: groups[key].owner or 0):
            size = sum(tensor.numel() * tensor.element_size() for tensor in self.sums[key].values())
            if bucket and size > room:
                yield bucket
                bucket, room = {}, BUCKET
            bucket[key] = groups[key]
            room -= size
        if bucket:
            yield bucket

    def scatter(self, groups: Mapping[Key, DividedGroup], owners: BlockOwners) -> None:
        """Add the sums of divided blocks up, each entry in the process that keeps it, in one message."""
        wholes = [self.sums[key]["square"].view(group.whole_shape) for key, group in groups.items()]
        parts = owners.repeated(scattered(wholes, [group.layout for group in groups.values()]))
        for key, part in zip(groups, parts, strict=True):
            self.sums[key] = {"square": part}


def plus(number: int | Tensor, other: int | Tensor) -> int | Tensor:
    """The sum; a zero of Python takes no operation."""
    if isinstance(number, int) and number == 0:
        return other
    return number if isinstance(other, int) and other == 0 else number + other


def only_where(accepted: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, or zeros if `accepted`, 0-dim, is false."""
    return {name: torch.where(accepted.to(tensor.device), tensor, 0) for name, tensor in tensors.items()}


def with_symmetric(
    approximation: Approximation, sums: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Sums of `additive` with a function of the symmetric matrices among them: messages carry only the elements on and
    above the diagonal (`pack_symmetric`)."""
    symmetric = {side.statistic.whole.name for side in approximation.sides if not side.diagonal}
    return {name: change(tensor) if name in symmetric else tensor for name, tensor in sums.items()}
