"""The emitted module: the captured graph with a tap on the output of every use.

Before                                          After
    linear = F.linear(x, fc_weight, fc_bias)        linear = F.linear(x, fc_weight, fc_bias)
    tanh = torch.tanh(linear)                       fc_probes = probes[0]
    return tanh                                     fc_tap = self.taps.fc(linear, x, fc_probes)
                                                    tanh = torch.tanh(fc_tap)
                                                    return (tanh, (tanh,))

A tap returns its first argument unchanged. What it does in the backward is its own business: the module is handed in.
The second output holds the Fisher's outputs, in the order of `program.outputs`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from .graphs.holder import attribute
from .graphs.inplace import memories
from .graphs.operations import changes_memory, has_effect
from .ir import KEPT, SERIES, Program, Registration, Use, tensor_attrs
from .matching.jacobians import KEY as JACOBIAN
from .matching.jacobians import Jacobian

TapFactory = Callable[[Registration, Use], nn.Module]
LinkFactory = Callable[[Registration, Use, bool, bool], nn.Module]  # of a use, the first, the last of its tower


def rewrite(program: Program, tap: TapFactory, link: LinkFactory | None = None) -> fx.GraphModule:
    """Emit the module. Its inputs are the graph's placeholders and then `probes`, one mapping a registration.

    link: of the uses of series; None: leave links out.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(program.graph, copies)
    for node, copy in copies.items():
        if node.op == "placeholder":
            copy.args = ()  # no defaults: all inputs are given, and `probes` comes last
    hoist(graph, [copies[use.attrs[KEPT]] for one in program.registrations for use in one.uses if use.mask_dims])
    jacobians = emit_jacobians(graph)
    probes = add_probes(graph)
    order = {node: n for n, node in enumerate(graph.nodes)}
    taps = Numbered()
    tapped: dict[fx.Node, fx.Node] = {}  # a node -> its last tap, which its readers read instead
    links = Numbered()
    for number, registration in enumerate(program.registrations):
        if link is not None and registration.approximation in SERIES:
            insert_links(graph, number, registration, link, links, copies, tapped, probes, order)
        for use in registration.uses:
            name = taps.fresh(tap_name(registration))
            taps[name] = tap(registration, use)
            insert_tap(graph, name, number, use, copies, tapped, probes)
    fisher = tuple(tapped.get(copies[node], copies[node]) for node in program.outputs)
    graph.output((fx.map_arg(output, lambda node: tapped.get(node, node)), fisher))
    protect(graph)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    graph.lint()
    targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    held: dict[str, Any] = {target: attribute(program.root, target) for target in targets}
    held |= {f"taps.{name}": one for name, one in taps.items()} | {f"links.{name}": one for name, one in links.items()}
    return fx.GraphModule({**held, **jacobians}, graph, "Emitted")


def emit_jacobians(graph: fx.Graph) -> dict[str, nn.Module]:
    """The modules that compute them, by their names."""
    made: dict[str, nn.Module] = {}
    for node in graph.nodes:
        if JACOBIAN in node.meta:
            node.op, node.target = "call_module", f"jacobians.{node.name}"
            made[node.target] = Jacobian(*node.meta[JACOBIAN])
    return made


def add_probes(graph: fx.Graph) -> fx.Node:
    """The last placeholder; all others are in the order of the model's inputs."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if placeholders:
        with graph.inserting_after(placeholders[-1]):
            return graph.placeholder("probes")
    with graph.inserting_before(next(iter(graph.nodes))):
        return graph.placeholder("probes")


def hoist(graph: fx.Graph, masks: Iterable[fx.Node]) -> None:
    """Masks, which are computed from inputs alone, in front of all taps."""
    wanted, stack = set(), list(masks)
    while stack:
        node = stack.pop()
        if node not in wanted and node.op != "placeholder":
            wanted.add(node)
            stack += node.all_input_nodes
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in reversed([node for node in graph.nodes if node in wanted]):
        inputs[-1].append(node)


def insert_tap(
    graph: fx.Graph,
    name: str,
    number: int,
    use: Use,
    copies: dict[fx.Node, fx.Node],
    tapped: dict[fx.Node, fx.Node],
    probes: fx.Node,
) -> None:
    """Tap `use.output`, behind earlier taps on the same node."""
    original = copies[use.output]
    output = tapped.get(original, original)
    readers = list(output.users)
    tensors = [copies[value] for value in tensor_attrs(use).values()]
    with graph.inserting_after(output):
        probe = graph.create_node("call_function", operator.getitem, (probes, number), name=f"{name}_probes")
    with graph.inserting_after(probe):
        arguments = (output, copies[use.input], probe, *tensors)
        tap = graph.create_node("call_module", f"taps.{name}", arguments, name=f"{name}_tap")
    tap.meta = dict(use.output.meta)
    for reader in readers:
        reader.replace_input_with(output, tap)
    tapped[original] = tap


def insert_links(
    graph: fx.Graph,
    number: int,
    registration: Registration,
    make: LinkFactory,
    links: Numbered,
    copies: dict[fx.Node, fx.Node],
    tapped: dict[fx.Node, fx.Node],
    probes: fx.Node,
    order: Mapping[fx.Node, int],
) -> None:
    """Behind every output of a series a link to the next use, in each tower:

    hidden_link = self.links.hidden(linear, h, hidden_probes, carrier of the use before, input of the use before)
    linked, carrier = hidden_link[0], hidden_link[1]
    """
    for tower in dict.fromkeys(use.tower for use in registration.uses):
        uses = sorted((u for u in registration.uses if u.tower == tower), key=lambda use: order[copies[use.output]])
        carrier: fx.Node | None = None
        earlier: fx.Node | None = None
        for place, use in enumerate(uses):
            name = links.fresh(tap_name(registration))
            links[name] = make(registration, use, use is uses[0], use is uses[-1])
            original = copies[use.output]
            output = tapped.get(original, original)
            readers = list(output.users)
            with graph.inserting_after(output):
                probe = graph.create_node("call_function", operator.getitem, (probes, number), name=f"{name}_probes")
            with graph.inserting_after(probe):
                near = (use, uses[max(place - 1, 0)], uses[min(place + 1, len(uses) - 1)])
                masks = [copies[one.attrs[KEPT]] for one in near if KEPT in one.attrs]
                arguments = (output, copies[use.input], probe, carrier, earlier, *masks)
                link = graph.create_node("call_module", f"links.{name}", arguments, name=f"{name}_link")
            with graph.inserting_after(link):
                carrier = graph.create_node("call_function", operator.getitem, (link, 1), name=f"{name}_carrier")
                linked = graph.create_node("call_function", operator.getitem, (link, 0), name=f"{name}_linked")
            linked.meta = dict(use.output.meta)
            for reader in readers:
                reader.replace_input_with(output, linked)
            tapped[original] = linked
            earlier = copies[use.input]


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
        readers = [user for one in (owner, source) for user in one.users if order[user] > order[owner]]
        with graph.inserting_after(owner):
            copy = graph.call_function(torch.clone, (owner,))
        copy.meta = dict(owner.meta)
        for reader in readers:
            reader.replace_input_with(owner, copy)
            reader.replace_input_with(source, copy)


def tap_name(registration: Registration) -> str:
    """`"encoder.0.weight"` -> `"encoder_0"`: the module, if the parameter has one."""
    path, _, last = registration.parameters[0].rpartition(".")
    return (path or last).replace(".", "_")


class Numbered(dict[str, nn.Module]):
    """Modules by names of their own: "fc", "fc_1", "fc_2"."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: Counter[str] = Counter()

    def fresh(self, name: str) -> str:
        while (found := f"{name}_{self.tried[name]}" if self.tried[name] else name) in self:
            self.tried[name] += 1
        return found
