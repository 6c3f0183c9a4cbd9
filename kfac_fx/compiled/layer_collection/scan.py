"""Automatic registration: the compiler's passes over the graph behind the registered losses, minus what is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from torch import fx

from kfac_fx.compiled.layer_collection.find_use import Collection
from kfac_fx.compiled.layer_collection.fisher_blocks import CLASSES, INDEP, KINDS, FisherBlock, block_class
from kfac_fx.linalg.arguments import choice
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.choose import cut_sides
from kfac_fx.passes.errors import ApproximationError, LinkError, RegistrationError
from kfac_fx.passes.graphs.labels import ancestors, in_example, symbolic_sizes, with_batch_dim
from kfac_fx.passes.ir import Program, Registration, Use, where
from kfac_fx.passes.pipeline import after_registrations, run
from kfac_fx.recording.moments import Key


class Scan:
    """One scan of a collection's graph for blocks of the parameters that are not registered yet.

    Attributes:
        wanted: the names of parameters and pieces that are to be registered.
        owners: the parameters that these names belong to.
        taken: the names that are registered already.
        behind: for every tower of the losses the nodes behind it. Losses were registered in the order of towers.
    """

    def __init__(self, collection: Collection, wanted: Sequence[str], batch_size: int | None) -> None:
        self.collection, self.batch_size = collection, batch_size
        self.taken, self.owner = collection.registered_variables, collection.fisher_blocks.owner
        self.wanted = frozenset(
            name for name in wanted if name not in self.taken and self.owner(name) not in self.taken
        )
        self.owners = {self.owner(name) for name in self.wanted}
        by_loss = collection.towers_by_loss
        if len({len(towers) for towers in by_loss}) > 1:
            rows = ", ".join(f"{towers[0].name}: {len(towers)}" for towers in by_loss)
            raise RegistrationError(f"every loss must be registered for the same number of towers, not {rows}")
        self.behind = [
            ancestors([node for loss in tower for node in loss.inputs]) for tower in zip(*by_loss, strict=True)
        ]

    def open(self, name: str) -> bool:
        """Whether a parameter or a piece is to be registered."""
        return bool({name, self.owner(name)} & self.wanted) and not self.collection.fisher_blocks.shared(
            self.taken, [name]
        )

    def blocks(self) -> dict[Key, FisherBlock]:
        """See `LayerCollection.auto_register_layers`."""
        program = run(self.program(), after_registrations(self.without_taken))
        return {
            registration.parameters: self.block(registration)
            for registration in program.registrations
            if all(self.open(name) for name in registration.parameters)
        }

    def program(self) -> Program:
        """The graph, in which only the parameters that are to be registered count as parameters."""
        collection = self.collection
        defaults: dict[str, str] = {}
        for name, kind in KINDS.items():
            default = collection.default_approximation(name)
            if not kind.multi and default != kind.default:
                defaults |= dict.fromkeys(kind.layers or (name,), kind.approximations[default])
        bare = collection.bare_program
        pieces = tuple(piece for piece in collection.asked_pieces(*self.wanted) if piece.parameter in self.owners)
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
            unregistered = {name for name in group if self.open(name)}
            if group == unregistered:
                groups[group] = approximation if approximation in APPROXIMATIONS else INDEP.get(approximation or "")
            elif unregistered:
                whole, rest = ", ".join(sorted(group)), ", ".join(sorted(unregistered))
                raise LinkError(f"{rest} in linked group ({whole}) was not matched: the others are registered already")
        return groups

    def without_taken(self, program: Program) -> Program:
        """Registered parameters as if they were frozen, and every use with its cases where those of its loss are."""
        self.collection.pieces.update(program.pieces)
        (first, *_) = self.collection.towers_by_loss
        matches = []
        for use in program.matches:
            places = {role: place for role, place in use.parameters.items() if self.open(place.parameter)}
            if not places:
                continue
            use = replace(use, parameters=places)
            cases = symbolic_sizes(first[self.tower_of(use)].inputs[0])[:1]  # towers may be of different sizes
            matches.append(with_batch_dim(use, cases[0]) if use.batch_dim is None and cases and cases[0] else use)
        return program.but(matches=tuple(matches))

    def tower_of(self, use: Use) -> int:
        return next((number for number, nodes in enumerate(self.behind) if use.output in nodes), 0)

    # --- blocks -----------------------------------------------------------------------------------------------------

    def block(self, registration: Registration) -> FisherBlock:
        """The block of a registration, with its uses by tower."""
        towers: list[tuple[Use, ...]] = [
            tuple(use for use in registration.uses if self.tower_of(use) == number)
            for number in range(len(self.behind))
        ]
        if not registration.generic:
            towers = [tower for tower in towers if tower]
        num_uses = self.folded(registration)
        multi = any(len(tower) > 1 for tower in towers) or (num_uses or 1) > 1
        name = self.approximation(registration, multi)
        blocks = cut_sides(APPROXIMATIONS[name], registration.blocks)
        registration = replace(registration, approximation=name, blocks=blocks)
        try:
            return block_of(self.collection, registration, towers, num_uses)
        except RegistrationError as error:
            if not registration.structure.series or self.asked(registration) is not None:
                raise
            registration = replace(registration, approximation="kron_indep", reason=str(error))
        return block_of(self.collection, registration, towers, num_uses)

    def approximation(self, registration: Registration, multi: bool) -> str:
        """Towers are no uses: one use in each is a plain layer. Several take the default of the kind's multi form."""
        family = next((layers for layers in CLASSES if registration.layer in layers), ())
        kinds = [name for name, kind in KINDS.items() if (kind.layers or (name,)) == family]
        if self.asked(registration) is not None:
            return self.linked_approximation(registration, kinds)
        if not multi:
            return "kron" if registration.approximation == "kron_indep" else registration.approximation
        kind = next((name for name in kinds if KINDS[name].multi), None)
        if kind is None or registration.approximation not in ("kron", "kron_indep", "diagonal"):
            return registration.approximation
        return KINDS[kind].ours(self.collection.default_approximation(kind)) or registration.approximation

    def asked(self, registration: Registration) -> str | None:
        """The approximation of the linked group that these parameters are."""
        return self.collection.linked_parameters.get(frozenset(registration.parameters))

    def linked_approximation(self, registration: Registration, kinds: Sequence[str]) -> str:
        """Our name. Raises ApproximationError if parameters of no layer do not have it."""
        asked = self.asked(registration) or ""
        ours = next((ours for kind in kinds if (ours := KINDS[kind].ours(asked))), None)
        if registration.generic and ours is None:
            name = f"the linked {registration}, which no layer has: approximation"
            choice(name, asked, KINDS["generic"].approximations, ApproximationError)
        return registration.approximation if ours is None or ours == asked else ours

    def folded(self, registration: Registration) -> int | None:
        """How many uses the rows of an output hold, one after another, if batch_size tells."""
        if self.batch_size is None or registration.layer not in ("linear", "embedding", "conv2d"):
            return None
        use = registration.uses[0]
        value = use.output.meta.get("val")
        sizes = [] if value is None else [in_example(size) for size in value.shape]
        rows = sizes[:1] if registration.layer == "conv2d" else sizes[:-1]
        if not sizes:
            return None
        if self.batch_size in rows:
            return prod(rows) // self.batch_size if prod(rows) > self.batch_size else None
        if rows and rows[0] % self.batch_size == 0:
            return rows[0] // self.batch_size
        raise RegistrationError(
            f"{registration} at {where(use.output)} has {rows} rows, which is no multiple of "
            f"batch_size={self.batch_size}"
        )


def block_of(
    collection: Collection, registration: Registration, towers: Sequence[tuple[Use, ...]], num_uses: int | None = None
) -> FisherBlock:
    """The block of a registration that the compiler made."""
    multi = any(len(tower) > 1 for tower in towers) or (num_uses or 1) > 1
    make = block_class(registration.layer, registration.approximation, multi)
    names, name = registration.parameters, registration.approximation
    block = make(collection, names, name, num_uses=num_uses, reason=registration.reason)
    block.sampling, block.side_blocks = registration.sampling or collection.sampling, registration.blocks
    for tower in towers:
        if registration.generic:
            block.register_additional_tower()
        else:
            block.add_tower(tower)
    return block


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
        outputs = Counter((use.output, use.through) for use in block.registration.uses)
        for (output, _), times in outputs.items():
            if times > 1:
                yield f"{', '.join(names)} is registered with {times} uses at {where(output)}, which is 1 use"
            if output not in subgraph:
                yield f"{', '.join(names)} is registered at {where(output)}; the losses do not depend on it"
