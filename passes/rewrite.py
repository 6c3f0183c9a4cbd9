"""The emitted module: the captured graph with a tap on the output of every use.

Before                                          After
    linear = F.linear(x, fc_weight, fc_bias)        linear = F.linear(x, fc_weight, fc_bias)
    tanh = torch.tanh(linear)                       fc_probes = probes[0]
    return tanh                                     fc_tap = self.taps.fc(linear, x, fc_probes)
                                                    tanh = torch.tanh(fc_tap)
                                                    return (tanh, (tanh,))

A tap returns its first argument unchanged. The caller passes the module, which decides what happens in the backward.
The second output holds the Fisher's outputs, in the order of `program.outputs`.

The module has Python code, with names of the user's in it. Names that the code or the module has for itself, keywords,
and names that Python reads as others, are replaced; `renamed` tells which.
"""

from __future__ import annotations

import operator
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, fx, nn

from .graphs.edit import attribute, memories
from .graphs.labels import everything_behind
from .graphs.operations import changes_memory, has_effect, no_grad_region
from .graphs.spelling import as_written
from .ir import ROW_MASK, Program, Registration, Use, tensor_attrs
from .parametrization import Computed, Value, nodes_of
from .torch_private import hold_apart, submodules_of

TapFactory = Callable[[Registration, Use], nn.Module]
LinkFactory = Callable[[Registration, Use, bool, bool], nn.Module]  # of a use, the first, the last of its tower


def rewrite(program: Program, tap: TapFactory, link: LinkFactory | None = None) -> fx.GraphModule:
    """Emit the module. Its inputs are the graph's placeholders and then `probes`, one mapping a registration.

    link: of the uses of series; None: leave links out.
    """
    emission = Emission(program)
    for number, registration in enumerate(program.registrations):
        if link is not None and registration.structure.series:
            emission.add_links(number, registration, link)
        for use in registration.uses:
            emission.add_tap(number, registration, use, tap)
    return emission.module(program)


def same_graph(program: Program, other: Program) -> bool:
    """Whether the modules of two programs differ in nothing but their taps."""
    same = program.graph is other.graph and program.root is other.root
    return same and tapped_places(program) == tapped_places(other)


def tapped_places(program: Program) -> list[Any]:
    """All that decides on the graph of the emitted module, but for the program's own. Links have no places here: a
    program with series is like no other."""
    places: list[Any] = [*program.outputs]
    for registration in program.registrations:
        uses = [(use.output, use.input, tensor_attrs(use), bool(use.mask_dims)) for use in registration.uses]
        places.append((registration.parameters, uses, object() if registration.structure.series else None))
    return places


def with_taps(module: fx.GraphModule, program: Program, tap: TapFactory) -> fx.GraphModule:
    """Another module of the graph of an emitted one, with taps of its own. Code, tensors and functions are shared.

    program: it, or that of `same_graph`.
    """
    taps, names = nn.Module(), Numbered()
    for registration in program.registrations:
        for use in registration.uses:
            name = names.fresh(tap_name(registration))
            names[name] = tap(registration, use)
            taps.add_module(name, names[name])
    other: fx.GraphModule = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    hold_apart(other, {**submodules_of(module), "taps": taps})
    return other


class Emission:
    """A graph on its way to the emitted module.

    copies: of the program's nodes.
    computed: the nodes of what uses need beside the program's nodes; those of modules by registration.
    modules: those that `computed` calls.
    tapped: a node -> its last tap, which its readers read instead.
    """

    def __init__(self, program: Program) -> None:
        self.graph, self.copies, self.tapped = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
        self.taps, self.links = Numbered(), Numbered()
        self.output = self.graph.graph_copy(program.graph, self.copies)
        as_written(self.graph)
        for node in program.inputs:
            self.copies[node].args = ()  # no defaults: all inputs are given, and `probes` comes last
        uses = [use for registration in program.registrations for use in registration.uses]
        masks = (node for use in uses if use.mask_dims for node in nodes_of(use.attrs[ROW_MASK]))
        hoist(self.graph, [self.copies[node] for node in masks])
        self.probes = add_probes(self.graph)
        self.computed: dict[tuple[Computed, int | None], fx.Node] = {}
        self.modules: dict[str, Any] = {}
        self.order = {node: n for n, node in enumerate(self.graph.nodes)}

    def value(self, value: Value, number: int) -> fx.Node:
        """The node of a value that a use needs: behind the last one that it is computed from.

        number: of the registration of the use.
        """
        if isinstance(value, fx.Node):
            return self.copies[value]
        key = value, number if isinstance(value.function, nn.Module) else None
        if key not in self.computed:
            arguments = fx.map_arg(value.arguments, self.copies.__getitem__)
            last = max(self.probes, *(self.copies[node] for node in value.nodes))  # nodes compare by their places
            with self.graph.inserting_after(last):
                self.computed[key] = self.call(value.function, arguments, number)
        return self.computed[key]

    def call(self, function: Callable[..., Any], arguments: Any, number: int) -> fx.Node:
        """A call of a function; of a module, which may be expensive, only where the registration is recorded."""
        if not isinstance(function, nn.Module):
            return self.graph.call_function(function, arguments)
        name = f"computed.{len(self.modules)}"
        self.modules[name] = IfRecorded(function)
        node = self.graph.create_node("call_module", name)
        with self.graph.inserting_before(node):
            probe = self.graph.call_function(operator.getitem, (self.probes, number))
        node.args = (probe, *arguments)
        return node

    def last(self, use: Use) -> fx.Node:
        """The node that stands for the use's output so far."""
        original = self.copies[use.output]
        return self.tapped.get(original, original)

    def probe(self, output: fx.Node, number: int, name: str) -> fx.Node:
        with self.graph.inserting_after(output):
            return self.graph.create_node(
                "call_function", operator.getitem, (self.probes, number), name=f"{name}_probes"
            )

    def stands_for(self, use: Use, tap: fx.Node, readers: Iterable[fx.Node]) -> None:
        """Those that read the use's output read `tap`."""
        output, tap.meta = self.last(use), dict(use.output.meta)
        for reader in readers:
            reader.replace_input_with(output, tap)
        self.tapped[self.copies[use.output]] = tap

    def add_tap(self, number: int, registration: Registration, use: Use, make: TapFactory) -> None:
        """Behind earlier taps on the same node."""
        name, output = self.taps.fresh(tap_name(registration)), self.last(use)
        self.taps[name] = make(registration, use)
        readers = list(output.users)
        probe = self.probe(output, number, name)
        tensors = [self.value(value, number) for value in tensor_attrs(use).values()]
        with self.graph.inserting_after(probe):
            arguments = (output, self.copies[use.input], probe, *tensors)
            tap = self.graph.create_node("call_module", f"taps.{name}", arguments, name=f"{name}_tap")
        self.stands_for(use, tap, readers)

    def add_links(self, number: int, registration: Registration, make: LinkFactory) -> None:
        """Behind every output of a series a link to the next use, in each tower:

        hidden_link = self.links.hidden(linear, h, hidden_probes, carrier of the use before, input of the use before)
        linked, carrier = hidden_link[0], hidden_link[1]
        """
        for tower in dict.fromkeys(use.tower for use in registration.uses):
            uses = [use for use in registration.uses if use.tower == tower]
            uses.sort(key=lambda use: self.order[self.copies[use.output]])
            before: tuple[fx.Node | None, fx.Node | None] = None, None  # carrier and input of the last use
            for place, use in enumerate(uses):
                near = (use, uses[max(place - 1, 0)], uses[min(place + 1, len(uses) - 1)])
                masks = [self.value(other.attrs[ROW_MASK], number) for other in near if ROW_MASK in other.attrs]
                name, output = self.links.fresh(tap_name(registration)), self.last(use)
                self.links[name] = make(registration, use, use is uses[0], use is uses[-1])
                readers = list(output.users)
                probe = self.probe(output, number, name)
                with self.graph.inserting_after(probe):
                    arguments = (output, self.copies[use.input], probe, *before, *masks)
                    link = self.graph.create_node("call_module", f"links.{name}", arguments, name=f"{name}_link")
                with self.graph.inserting_after(link):
                    carrier, linked = (
                        self.graph.create_node("call_function", operator.getitem, (link, n), name=f"{name}_{suffix}")
                        for n, suffix in ((1, "carrier"), (0, "linked"))
                    )
                self.stands_for(use, linked, readers)
                before = carrier, self.copies[use.input]

    def module(self, program: Program) -> fx.GraphModule:
        graph, tapped = self.graph, self.tapped
        fisher = tuple(tapped.get(self.copies[node], self.copies[node]) for node in program.outputs)
        graph.output((fx.map_arg(self.output, lambda node: tapped.get(node, node)), fisher))
        protect(graph)
        graph.eliminate_dead_code(is_impure_node=has_effect)
        cut_tangents(graph)
        rename_nodes(graph)
        graph.lint()
        names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
        targets = written_names(names)
        for node in graph.find_nodes(op="get_attr"):
            node.target = targets[str(node.target)]
        held: dict[str, Any] = {target: attribute(program.root, name) for name, target in targets.items()}
        held |= {f"taps.{name}": tap for name, tap in self.taps.items()}
        held |= {f"links.{name}": link for name, link in self.links.items()}
        module = fx.GraphModule({**held, **self.modules}, graph, "Emitted")
        module.meta[OTHER_NAMES] = {name: target for name, target in targets.items() if name != target}
        # fx's own call prints generated code beside an error; each GraphModule has a class of its own.
        type(module).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return module


# --- names ------------------------------------------------------------------------------------------------------------

OTHER_NAMES = "renamed"  # key of the meta of an emitted module
MODULE = nn.Module()
OWN = ("taps", "links", "computed", OTHER_NAMES)  # modules in an emitted module


def renamed(module: fx.GraphModule) -> dict[str, str]:
    """The tensors that an emitted module has under other names than the model: theirs -> those of the module."""
    return dict(module.meta[OTHER_NAMES])


@cache
def names_of_modules() -> frozenset[str]:
    """The attributes of a module with a graph, such as `code` and `meta`."""
    return frozenset((*dir(fx.GraphModule(MODULE, fx.Graph())), *OWN))


def written_names(names: Iterable[str]) -> dict[str, str]:
    """The names of tensors, with those that an emitted module has for them."""
    names = list(names)
    prefix = OTHER_NAMES
    while any(name.split(".")[0] == prefix for name in names):
        prefix += "_"
    return {name: name if is_written(name) else f"{prefix}.{number}" for number, name in enumerate(names)}


def is_written(name: str) -> bool:
    """Whether the code of a module may have this name. Python takes some letters for others, as "ﬁ" for "fi"."""
    parts = name.split(".")
    return parts[0] not in names_of_modules() and as_python_reads(name) == name and not any(map(iskeyword, parts))


def as_python_reads(name: str) -> str:
    return unicodedata.normalize("NFKC", name)


def rename_nodes(graph: fx.Graph) -> None:
    """Arguments of the code have the names of their nodes, and no node is called `self`."""
    taken = {node.name for node in graph.nodes} | {"self"}
    for node in graph.nodes:
        if node.name == "self":
            node.name = next(name for name in (f"self_{n}" for n in range(len(taken))) if name not in taken)
        if node.op == "placeholder":
            node.target = node.name


# --- parts of an emission ---------------------------------------------------------------------------------------------


class IfRecorded(nn.Module):
    """A function that taps read only where they have probes; None without them."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, probes: Any, *arguments: Any) -> Any:
        return self.function(*arguments) if probes else None


def add_probes(graph: fx.Graph) -> fx.Node:
    """The last placeholder; all others are in the order of the model's inputs."""
    placeholders = graph.find_nodes(op="placeholder")
    if placeholders:
        with graph.inserting_after(placeholders[-1]):
            return graph.placeholder("probes")
    with graph.inserting_before(next(iter(graph.nodes))):
        return graph.placeholder("probes")


def hoist(graph: fx.Graph, masks: Iterable[fx.Node]) -> None:
    """Masks, which are computed from inputs alone, in front of all taps."""
    inputs = graph.find_nodes(op="placeholder")
    for node in sorted(everything_behind(masks) - set(inputs), reverse=True):
        inputs[-1].append(node)


def protect(graph: fx.Graph) -> None:
    """Copies of taps and inputs whose memory is changed in place: autograd forbids the one, and recording must not
    change the batch that the model is about to see."""
    order = {node: n for n, node in enumerate(graph.nodes)}
    owners = memories(graph)
    changed = dict.fromkeys(owners[node] for node in graph.nodes if changes_memory(node) and owners[node] is not node)
    for owner in changed:
        if owner.op not in ("placeholder", "call_module"):
            continue
        source = owner
        while source.op == "call_module":
            source = source.args[0]  # type: ignore[assignment]  # a tap's first argument is a node
        readers = [user for node in (owner, source) for user in node.users if order[user] > order[owner]]
        with graph.inserting_after(owner):
            copy = graph.call_function(torch.clone, (owner,))
        for reader in readers:
            reader.replace_input_with(owner, copy)
            reader.replace_input_with(source, copy)


def cut_tangents(graph: fx.Graph) -> None:
    """Detach what enters regions without gradients: torch.no_grad leaves forward-mode derivatives on."""
    for region in filter(no_grad_region, graph.nodes):
        for operand in dict.fromkeys(region.args[2:]):
            if isinstance(operand, fx.Node) and isinstance(operand.meta.get("val"), Tensor):
                with graph.inserting_before(region):
                    region.replace_input_with(operand, graph.call_function(torch.detach, (operand,)))


def tap_name(registration: Registration) -> str:
    """`"encoder.0.weight"` -> `"encoder_0"`: the module, if the parameter has one."""
    path, _, last = registration.parameters[0].rpartition(".")
    return as_python_reads((path or last).replace(".", "_"))


class Numbered(dict[str, nn.Module]):
    """Modules by names of their own: "fc", "fc_1", "fc_2". None is a keyword of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: Counter[str] = Counter()

    def fresh(self, name: str) -> str:
        def taken(free: str) -> bool:
            return free in self or hasattr(MODULE, free) or iskeyword(free)

        while taken(free := f"{name}_{self.tried[name]}" if self.tried[name] else name):
            self.tried[name] += 1
        return free
