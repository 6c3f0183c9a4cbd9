"""Automatic registration: the compiler's passes over the graph behind the registered losses, minus what is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from torch import fx

from kfac_fx.layer_collection.find_use import Collection
from kfac_fx.layer_collection.fisher_blocks import CLASSES, INDEP, KINDS, FisherBlock, block_class
from kfac_fx.layer_collection.names import Key
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.check import check
from kfac_fx.passes.claiming.approximation import cut_sides
from kfac_fx.passes.cut import cut
from kfac_fx.passes.errors import ApproximationError, LinkError, RegistrationError
from kfac_fx.passes.expressions import express
from kfac_fx.passes.graphs.labels import ancestors, symbolic_sizes
from kfac_fx.passes.graphs.sizes import in_example, with_batch_dim
from kfac_fx.passes.ir import Program, Registration, Use, where
from kfac_fx.passes.link import link
from kfac_fx.passes.match import match
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.resolve import resolve


class Scan:
    """One scan of a collection's graph for blocks of what of the parameters `wanted` is not registered yet.

    wanted: names of parameters, or of pieces. owners: the parameters that have something left to register.
    """

    def __init__(self, collection: Collection, wanted: Sequence[str], batch_size: int | None) -> None:
        self.collection, self.batch_size = collection, batch_size
        self.taken, self.owner = collection.registered_variables, collection.fisher_blocks.owner
        self.wanted = frozenset(
            name for name in wanted if name not in self.taken and self.owner(name) not in self.taken
        )
        self.owners = {self.owner(name) for name in self.wanted}

    def open(self, name: str) -> bool:
        """Whether a parameter or a piece is to be registered."""
        return bool({name, self.owner(name)} & self.wanted) and not self.collection.fisher_blocks.shared(
            self.taken, [name]
        )

    def blocks(self) -> dict[Key, FisherBlock]:
        """See `LayerCollection.auto_register_layers`."""
        behind = self.towers()

        def apart(program: Program) -> Program:
            """What is registered already is as if it were frozen."""
            self.collection.pieces.update(program.pieces)
            rest = [(use, {r: one for r, one in use.parameters.items() if self.open(one.parameter)})
                    for use in program.matches]  # fmt: skip
            matches = (replace(use, parameters=own) for use, own in rest if own)
            return program.but(matches=tuple(self.with_tower(use, behind) for use in matches))

        found = run(self.program(), (link, express, match, cut, apart, resolve, check))
        return {
            one.parameters: self.block(one, behind)
            for one in found.registrations
            if all(self.open(name) for name in one.parameters)
        }

    def towers(self) -> list[set[fx.Node]]:
        """The graph behind every tower, which the order in which losses were registered tells apart."""
        by_loss = self.collection.towers_by_loss
        if len({len(towers) for towers in by_loss}) > 1:
            rows = ", ".join(f"{one[0].name}: {len(one)}" for one in by_loss)
            raise RegistrationError(f"every loss must be registered for the same number of towers, not {rows}")
        return [ancestors([node for one in tower for node in one.inputs]) for tower in zip(*by_loss, strict=True)]

    def with_tower(self, use: Use, behind: Sequence[set[fx.Node]]) -> Use:
        """With its cases where those of its tower's loss are: towers may be of different sizes."""
        (first, *_) = self.collection.towers_by_loss
        size = symbolic_sizes(first[tower_of(use, behind)].inputs[0])[:1]
        return with_batch_dim(use, size[0]) if use.batch_dim is None and size and size[0] else use

    def program(self) -> Program:
        """Where only the parameters that are still to be registered count as such."""
        bare = self.collection.bare_program
        kinds = [kind for kind in KINDS if not KINDS[kind].multi]
        defaults = {
            layer: own
            for kind in kinds
            for layer in KINDS[kind].layers or (kind,)
            if self.collection.default_approximation(kind) != KINDS[kind].default
            and (own := KINDS[kind].own(self.collection.default_approximation(kind)))
        }
        pieces = tuple(one for one in self.collection.asked_pieces(*self.wanted) if one.parameter in self.owners)
        options = replace(bare.options, strict=False, linked=self.linked(), approximations=defaults, pieces=pieces)
        return bare.but(
            parameters={name: value for name, value in bare.parameters.items() if name in self.owners},
            aliases={alias: name for alias, name in bare.aliases.items() if name in self.owners},
            options=options,
        )

    def linked(self) -> dict[frozenset[str], str | None]:
        """Groups to keep together. Raises LinkError for one that is registered in part."""
        groups: dict[frozenset[str], str | None] = {}
        for group, approximation in self.collection.linked_parameters.items():
            rest_of = {name for name in group if self.open(name)}
            if group == rest_of:
                groups[group] = approximation if approximation in APPROXIMATIONS else INDEP.get(approximation or "")
            elif rest_of:
                whole = ", ".join(sorted(group))
                rest = ", ".join(sorted(rest_of))
                raise LinkError(f"{rest} in linked group ({whole}) was not matched: the others are registered already")
        return groups

    def block(self, one: Registration, behind: Sequence[set[fx.Node]]) -> FisherBlock:
        towers: list[tuple[Use, ...]] = [
            tuple(use for use in one.uses if tower_of(use, behind) == number) for number in range(len(behind))
        ]
        if not one.generic:
            towers = [tower for tower in towers if tower]
        num_uses = self.folded(one)
        multi = any(len(tower) > 1 for tower in towers) or (num_uses or 1) > 1
        chosen = self.approximation(one, multi)
        one = replace(one, approximation=chosen, blocks=cut_sides(APPROXIMATIONS[chosen], one.blocks))
        if one.structure.series:
            try:
                return block_of(self.collection, one, towers, num_uses)
            except RegistrationError as error:
                if self.asked(one) is not None:
                    raise
                one = replace(one, approximation="kron_indep", reason=str(error))
        return block_of(self.collection, one, towers, num_uses)

    def approximation(self, one: Registration, multi: bool) -> str:
        """Towers are no uses: one use in each is a plain layer. Several take the default of the kind's multi form."""
        family = next((layers for layers in CLASSES if one.layer in layers), ())
        kinds = [name for name in KINDS if (KINDS[name].layers or (name,)) == family]
        kind = next((name for name in kinds if KINDS[name].multi), None)
        if self.asked(one) is not None:
            return self.linked_approximation(one, kinds)
        if not multi:
            return "kron" if one.approximation == "kron_indep" else one.approximation
        if kind is None or one.approximation not in ("kron", "kron_indep", "diagonal"):
            return one.approximation
        return KINDS[kind].own(self.collection.default_approximation(kind)) or one.approximation

    def asked(self, one: Registration) -> str | None:
        """The approximation of the linked group that these parameters are."""
        return self.collection.linked_parameters.get(frozenset(one.parameters))

    def linked_approximation(self, one: Registration, kinds: Sequence[str]) -> str:
        """In our names. Raises ApproximationError for what parameters of no layer have not."""
        asked = self.asked(one) or ""
        own = next((own for kind in kinds if (own := KINDS[kind].own(asked))), None)
        if one.generic and own is None:
            there = " and ".join(map(repr, KINDS["generic"].approximations))
            raise ApproximationError(f"Bad value {asked!r} for the linked {one}, which no layer has: there are {there}")
        return one.approximation if own is None or own == asked else own

    def folded(self, one: Registration) -> int | None:
        """How many uses one after another are in the rows of an output, if batch_size tells."""
        outputs = [shape_of(use) for use in one.uses] if one.layer in ("linear", "embedding", "conv2d") else []
        if self.batch_size is None or not outputs or not outputs[0]:
            return None
        rows = outputs[0][:1] if one.layer == "conv2d" else outputs[0][:-1]
        if self.batch_size in rows:
            return prod(rows) // self.batch_size if prod(rows) > self.batch_size else None
        if rows and rows[0] % self.batch_size == 0:
            return rows[0] // self.batch_size
        raise RegistrationError(
            f"{one} at {where(one.uses[0].output)} has {list(rows)} rows, which is no multiple of "
            f"batch_size={self.batch_size}"
        )


def block_of(
    collection: Collection, one: Registration, towers: Sequence[tuple[Use, ...]], num_uses: int | None = None
) -> FisherBlock:
    """The block of a registration that the compiler made."""
    multi = any(len(tower) > 1 for tower in towers) or (num_uses or 1) > 1
    made = block_class(one.layer, one.approximation, multi)
    block = made(collection, one.parameters, one.approximation, num_uses=num_uses, reason=one.reason)
    block.sampling, block.side_blocks = one.sampling or collection.sampling, one.blocks
    for tower in towers:
        if one.generic:
            block.register_additional_tower()
        else:
            block.add_tower(tower)
    return block


def tower_of(use: Use, behind: Sequence[set[fx.Node]]) -> int:
    return next((number for number, nodes in enumerate(behind) if use.output in nodes), 0)


def shape_of(use: Use) -> list[int]:
    """Of the output, on the captured example; empty if the graph knows no sizes."""
    value = use.output.meta.get("val")
    return [] if value is None else [in_example(size) for size in value.shape]


def misplaced(collection: Collection, subgraph: frozenset[fx.Node]) -> Iterator[str]:
    """Errors that counting edges does not show: uses registered twice, uses that no loss depends on, and several
    uses of one mini-batch registered as several mini-batches."""
    several = max((len(towers) for towers in collection.towers_by_loss), default=1) > 1
    all_cases = {sizes[0] for node in collection.registered_losses.nodes if (sizes := symbolic_sizes(node))}
    for names, block in collection.fisher_blocks.items():
        uses = dict.fromkeys(use.output for tower in block.towers for use in tower)
        whole = [where(node) for node in uses if symbolic_sizes(node)[:1] == [*all_cases]]
        if len(block.towers) > 1 and not several and None not in all_cases and len(whole) > 1:
            yield (
                f"{', '.join(names)} has {len(block.towers)} towers, which are mini-batches of their own, but all "
                f"cases of the losses at each of {', '.join(whole)}: register the uses of one mini-batch together, "
                "with the _multi function"
            )
        outputs = Counter((use.output, use.region) for use in block.registration.uses)
        for (output, _), times in outputs.items():
            if times > 1:
                yield f"{', '.join(names)} is registered with {times} uses at {where(output)}, which is 1 use"
            if output not in subgraph:
                yield f"{', '.join(names)} is registered at {where(output)}; the losses do not depend on it"
