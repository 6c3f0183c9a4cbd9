"""Brings every operation to one spelling, so that layers are matched whichever way they are written.

Values never change.

Before                                   After
    aten.linear.default(x, w)                F.linear(x, w, None)
    x.relu()                                 torch.relu(x)
    F.layer_norm(x, [x.size(-1)], w)         F.layer_norm(x, [6], w, None, 1e-05), where the capture knows the size
    operator.add(b, y), b a parameter        torch.add(y, b)
    b - y                                    torch.add(torch.mul(y, -1.0), b)
    self.bn(x)                               F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-05)
    F.relu(x, inplace=True)                  torch.relu(x), and later readers of x read the result
    x[:, 0].copy_(y), x is read later        w = x[:, 0].copy_(y), and later readers of x read overwritten(x, w)
    F.nll_loss(x.log_softmax(1), y)          F.cross_entropy(x.log_softmax(1), y): the logarithms are logits, too
    w[0], w[:, 0], w a tensor                torch.select(w, 0, 0), torch.select(w, 1, 0)
    einsum("bi,ir,or->bo", x, v, w)          einsum("br,or->bo", einsum("bi,ir->br", x, v), w)
    einsum("bd,dd->bd", x, w)                einsum("bd,d->bd", x, torch.diagonal(w, 0, 0, 1))
    y, s = broadcast_tensors(x, g)           y, s = x, g.expand_as(x)
    w.repeat_interleave(n, 0)                w[arange(4).repeat_interleave(n)], where n is a size of the batch
    x * w.repeat(n, 1)                       x * w[arange(4).repeat(n)]
    w[:, ids]                                w.permute(1, 0)[ids].permute(1, 0): rows are looked up, as in an embedding

Every parameter is read once, under its canonical name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .errors import fatal
from .graphs.edit import attribute, functional, known_sizes, numbers, sequence
from .graphs.labels import Label, is_layer_of_data, labels, sizes_of
from .graphs.operations import JOINS, REDUCTIONS, adds_up, computed, dims_of, has_effect, op_name
from .graphs.spelling import (
    along_diagonals,
    in_pairs,
    name_axes,
    respell,
    sort_operands,
    spell_native,
    spell_selections,
)
from .ir import Copies, Program, copy_nodes
from .layers.embedding import learned
from .layers.linear import route
from .parametrizations.tables import merely_viewed, note_elements
from .torch_private import BatchNorm, InstanceNorm
from .tracing.settings import of_library


def normalize(program: Program) -> Program:
    """Normalize a graph; see the module's docstring."""
    graph, copies = fx.Graph(), Copies()
    read: dict[str, fx.Node] = {}

    def write(node: fx.Node) -> fx.Node | None:
        if node.op == "get_attr":
            name = program.aliases.get(str(node.target), str(node.target))
            if name not in read:
                read[name] = graph.get_attr(name)
                read[name].meta = dict(node.meta)
            return read[name]
        if node.op != "call_module":
            return None
        call = inline(graph, node, program.root.get_submodule(str(node.target)), copies)
        call.meta = dict(node.meta)
        return call

    copy_nodes(program.graph.nodes, graph, write, copies)
    known_sizes(graph)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    functional(graph)
    drop_casts(graph)
    sequence(graph)
    spell_native(graph)
    respell(graph)
    spell_selections(graph, program.parameters)
    shapes_of_computed(graph, program.parameters, program.root)
    broadcast_apart(graph)
    route(graph)
    sort_operands(graph, program.parameters)
    numbers(graph, program.root)
    expand_masks(graph, program.parameters)
    spell_losses(graph)
    name_axes(graph, program.parameters)
    along_diagonals(graph, program.parameters)
    in_pairs(graph, program.parameters)
    look_up_repeated(graph, program.parameters)
    look_up_rows(graph, program.parameters)
    mark_tables(graph, program.parameters)
    note_elements(graph, program.parameters, program.root)
    losses = tuple(copies.get(node, node) for node in program.outputs)
    return program.but(graph=graph, outputs=losses)


def inline(graph: fx.Graph, node: fx.Node, module: nn.Module, copies: Copies) -> fx.Node:
    """A call of a batch or instance norm module as the functional call that its forward makes."""
    operand = copies[node.args[0]] if node.args else copies[next(iter(node.kwargs.values()))]  # type: ignore[index]

    def held(name: str) -> fx.Node | None:
        return graph.get_attr(f"{node.target}.{name}") if getattr(module, name, None) is not None else None

    if isinstance(module, InstanceNorm):
        tensors = map(held, ("running_mean", "running_var", "weight", "bias"))
        by_input = module.training or not module.track_running_stats
        return graph.call_function(F.instance_norm, (operand, *tensors, by_input, module.momentum, module.eps))
    assert isinstance(module, BatchNorm), f"bug in kfac_fx: {type(module).__name__} was left whole"
    training = module.training or (module.running_mean is None and module.running_var is None)
    if module.training and module.track_running_stats and module.num_batches_tracked is not None:
        graph.call_function(torch.ops.aten.add_.Tensor, (held("num_batches_tracked"), 1))
    used = not module.training or module.track_running_stats
    mean, var = (held("running_mean"), held("running_var")) if used else (None, None)
    momentum = 0.0 if module.momentum is None else module.momentum  # None is among the capture's `effects`
    return graph.call_function(
        F.batch_norm, (operand, mean, var, held("weight"), held("bias"), training, momentum, module.eps)
    )


def broadcast_apart(graph: fx.Graph) -> None:
    """Spell tensors that are broadcast together, as torch.distributions does, as expanded by themselves."""
    for node in graph.nodes:
        source: Any = node.args[0] if op_name(node) == "getitem" else None
        if not isinstance(source, fx.Node) or op_name(source) != "broadcast_tensors":
            continue
        operands: Any = source.args[0] if isinstance(source.args[0], (list, tuple)) else source.args
        operand, sizes = operands[node.args[1]], sizes_of(node)
        whole = next((other for other in (operand, *operands) if sizes and sizes_of(other) == sizes), None)
        if whole is None:
            continue
        if whole is not operand:
            with graph.inserting_before(node):
                expanded = graph.call_method("expand_as", (operand, whole))
            expanded.meta = dict(node.meta)
            operand = expanded
        node.replace_all_uses_with(operand)
        graph.erase_node(node)
    for node in reversed(graph.find_nodes(op="call_function", target=torch.broadcast_tensors)):
        if not node.users:
            graph.erase_node(node)


# --- shapes -----------------------------------------------------------------------------------------------------------


def shapes_of_computed(graph: fx.Graph, parameters: Iterable[str], root: nn.Module) -> None:
    """Give tensors that are computed from parameters alone a value without data, where the trace has given them none.

    torch.fx knows no sizes. Those of parameters are known, and expressions of parameters are found by their sizes.
    """
    if any("val" in node.meta for node in graph.find_nodes(op="placeholder")):
        return
    label, values = labels(graph, parameters), dict[fx.Node, Any]()
    for node in graph.nodes:
        if label[node] not in (Label.PURE, Label.CONST):
            continue
        if node.op == "get_attr":
            held = attribute(root, str(node.target))
            if isinstance(held, Tensor):
                values[node] = torch.empty_like(held, device="meta", requires_grad=False)
        elif node.all_input_nodes and all(operand in values for operand in node.all_input_nodes) and is_known(node):
            try:
                with torch.no_grad():
                    values[node] = computed(node, *fx.map_arg((node.args, node.kwargs), lambda n: values[n]))
            except Exception as error:  # the operation needs values, or has no kernel without them
                if fatal(error):
                    raise
                continue
            parts = values[node] if isinstance(values[node], (list, tuple)) else [values[node]]
            if all(isinstance(part, Tensor) for part in parts):
                node.meta["val"] = values[node]


def is_known(node: fx.Node) -> bool:
    """Whether a node calls a function of torch or of Python, which does nothing else than compute."""
    target: Any = node.target
    if node.op == "call_function":
        return inspect.isbuiltin(target) or of_library(target)
    return node.op == "call_method"


# --- casts ------------------------------------------------------------------------------------------------------------


def drop_casts(graph: fx.Graph) -> None:
    """Drop each `x.type_as(w)` where both have one dtype: it is x, and its second operand would be one of the loss."""
    for node in graph.nodes:
        values = [operand.meta.get("val") for operand in node.all_input_nodes]
        if op_name(node) == "type_as" and len(values) == 2 and all(isinstance(value, Tensor) for value in values):
            first, second = values
            if (first.dtype, first.device) == (second.dtype, second.device) and not node.kwargs:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)


# --- losses of log-probabilities --------------------------------------------------------------------------------------


def spell_losses(graph: fx.Graph) -> None:
    """Spell the loss of logarithms of probabilities as that of logits, which they are: their softmax is the same."""
    for node in graph.nodes:
        args: Any = node.args
        if op_name(node) not in ("nll_loss", "nll_loss_nd") or not args:
            continue
        if op_name(node) == "nll_loss":
            given = dict(zip(inspect.signature(F.nll_loss).parameters, args, strict=False)) | node.kwargs
            reduction = given.get("reduction", "mean")
        else:
            names = ("input", "target", "weight", "reduction", "ignore_index")
            given = dict(zip(names, args, strict=False)) | node.kwargs
            reduction = REDUCTIONS[given.get("reduction", 1)]
        if {given.get("size_average"), given.get("reduce")} == {None} and adds_up(args[0], 1, dims_of(args[0])):
            weight, ignored = given.get("weight"), given.get("ignore_index", -100)
            node.target, node.kwargs = F.cross_entropy, {}
            node.args = (args[0], given["target"], weight, None, ignored, None, reduction, 0.0)


# --- tables -----------------------------------------------------------------------------------------------------------


def look_up_rows(graph: fx.Graph, parameters: Iterable[str]) -> None:
    """Look up the rows of a permuted table where data index another dimension of it than the first."""
    lookups = [(node, *lookup) for node in graph.nodes if (lookup := lookup_of(node)) is not None]
    label = labels(graph, parameters) if lookups else {}
    for node, table, dim, ids in lookups:
        value, index = table.meta["val"], ids.meta["val"]
        if label[table] is not Label.PURE or label[ids] is not Label.ACT:
            continue
        here, n = range(value.dim()), index.dim()
        first = (dim, *(other for other in here if other != dim))
        back = (*range(n, n + dim), *range(n), *range(n + dim, n + value.dim() - 1))
        with graph.inserting_before(node):
            turned = graph.call_function(torch.permute, (table, first))
            rows = graph.call_function(torch.ops.aten.index.Tensor, (turned, [ids]))
            written = graph.call_function(torch.permute, (rows, back))
        turned.meta = {**node.meta, "val": value.permute(first)}
        rows.meta = {**node.meta, "val": turned.meta["val"][index]}
        written.meta = dict(node.meta)
        node.replace_all_uses_with(written)
        graph.erase_node(node)


def look_up_repeated(graph: fx.Graph, parameters: Iterable[str]) -> None:
    """Spell the rows of a parameter that are repeated as often as the sizes of the batch say as looked up.

    w.repeat_interleave(n, 0), of the members of an ensemble that share a batch
        ->   w[torch.arange(4).repeat_interleave(n)]
    x * w.repeat(n, 1)
        ->   x * w[torch.arange(4).repeat(n)]
    """
    label = labels(graph, parameters)
    for node in list(graph.nodes):
        table, result = node.args[0] if node.args else None, node.meta.get("val")
        value = table.meta.get("val") if isinstance(table, fx.Node) else None
        if not isinstance(value, Tensor) or not isinstance(result, Tensor) or label[cast(Any, table)] is not Label.PURE:
            continue
        repeat = repeated_rows(node, value)
        if repeat is None:
            continue
        with graph.inserting_before(node):
            every = graph.call_function(torch.arange, (value.shape[0],), {"device": value.device})
            ids = repeat(every)
            rows = graph.call_function(torch.ops.aten.index.Tensor, (table, [ids]))
        every.meta = {**node.meta, "val": value.new_empty(value.shape[0], dtype=torch.int64)}
        ids.meta = {**node.meta, "val": value.new_empty(result.shape[0], dtype=torch.int64)}
        rows.meta = dict(node.meta)
        node.replace_all_uses_with(rows)
        graph.erase_node(node)


def repeated_rows(node: fx.Node, value: Tensor) -> Callable[[fx.Node], fx.Node] | None:
    """How a node repeats the numbers of the rows of `value`; None if it does something else, or a layer reads it: then
    its rows are those of a table."""
    name, args = op_name(node), cast(Any, node.args[1:])
    if value.dim() < 2 or node.kwargs or name not in ("repeat", "repeat_interleave") or not args:
        return None
    if name == "repeat_interleave":
        repeats, alone = args[0], args[1:] == (0,)
    else:
        sizes = args[0] if isinstance(args[0], (list, tuple)) else args
        repeats, alone = sizes[0], value.shape[0] > 1 and [*sizes[1:]] == [1] * (value.dim() - 1)
        alone &= all(op_name(user) in ("mul", "add", "div") for user in node.users)
    if not alone or not isinstance(repeats, fx.Node) or not isinstance(repeats.meta.get("val"), torch.SymInt):
        return None
    if name == "repeat_interleave":
        return lambda ids: node.graph.call_function(torch.repeat_interleave, (ids, repeats))
    return lambda ids: node.graph.call_method("repeat", (ids, (repeats,)))


def lookup_of(node: fx.Node) -> tuple[fx.Node, int, fx.Node] | None:
    """(the table, the dimension, the indices) of a node that looks up along one dimension that is not the first."""
    if op_name(node) == "index_select" and len(node.args) == 3:
        table, dim, ids = cast(Any, node.args)
    elif op_name(node) == "index" and isinstance(node.args[1], (list, tuple)):
        table, indices = cast(Any, node.args)
        places = [place for place, index in enumerate(indices) if index is not None]
        if len(places) != 1:
            return None
        dim, ids = places[0], indices[places[0]]
    else:
        return None
    value, index = (operand.meta.get("val") if isinstance(operand, fx.Node) else None for operand in (table, ids))
    if not isinstance(value, Tensor) or not isinstance(index, Tensor) or index.dtype is torch.bool:
        return None
    dim = dim % value.dim() if isinstance(dim, int) and value.dim() else 0
    return (table, dim, ids) if dim else None


# --- tables that layers are applied to --------------------------------------------------------------------------------


def mark_tables(graph: fx.Graph, parameters: Iterable[str]) -> None:
    """Mark a parameter that stands instead of a layer's input, or behind it: it is an embedding of all its rows.

    layer_norm(table, w, b)           ->   layer_norm(learned(table), w, b)
    linear(dropout(table)[:n], w)     ->   linear(dropout(learned(table))[:n], w)
    linear(cat([one, other]), w)      ->   linear(cat([learned(one), learned(other)]), w)
    """
    label = labels(graph, parameters)
    for node in [node for node in graph.nodes if label[node] is Label.FREE and is_layer_of_data(node, label)]:
        table = node.args[0]
        if not isinstance(table, fx.Node) or label[table] is not Label.PURE:
            continue
        tables = tables_behind(table, node, label) or []
        if all(reader is node or has_rows(table) for table, reader in tables):
            for table, reader in dict.fromkeys(tables):
                with graph.inserting_before(reader):
                    marked = graph.call_function(learned, (table,))
                marked.meta = dict(table.meta) | {key: node.meta[key] for key in ("stack_trace",) if key in node.meta}
                reader.replace_input_with(table, marked)


def tables_behind(
    table: fx.Node, reader: fx.Node, label: Mapping[fx.Node, Label]
) -> list[tuple[fx.Node, fx.Node]] | None:
    """The parameters that a node is made of, each with the operation that reads it; None if others are combined there
    than by joining them."""
    if merely_viewed(table):
        return [(table, reader)]
    before = [operand for operand in table.all_input_nodes if label.get(operand) is Label.PURE]
    if len(before) != 1 and op_name(table) not in JOINS:
        return None
    found = [tables_behind(operand, table, label) for operand in before]
    return None if None in found else [pair for pairs in found for pair in pairs or ()]


def has_rows(table: fx.Node) -> bool:
    value = table.meta.get("val")
    return isinstance(value, Tensor) and value.dim() > 1


# --- masks of attention -----------------------------------------------------------------------------------------------


def expand_masks(graph: fx.Graph, parameters: Iterable[str]) -> None:
    """Expand a mask that is added inside attention to the cases, so that its gradient has a row for every case.

    sdpa(q, k, v, table)   ->   sdpa(q, k, v, table.expand(n, -1, -1, -1))
    """
    attention = [node for node in graph.nodes if op_name(node) == "scaled_dot_product_attention"]
    if not attention:
        return
    label = labels(graph, parameters)
    for node in attention:
        masks = [*node.args[3:4], *(value for key, value in node.kwargs.items() if key == "attn_mask")]
        if not masks or not isinstance(masks[0], fx.Node):
            continue
        query, mask = node.args[0], masks[0]
        q, m = (operand.meta.get("val") if isinstance(operand, fx.Node) else None for operand in (query, mask))
        if label[mask] not in (Label.PURE, Label.FREE) or not isinstance(q, Tensor) or not isinstance(m, Tensor):
            continue
        new = q.dim() - m.dim()  # dimensions that the mask lacks
        if new < 0 or (new == 0 and m.shape[0] != 1):
            continue
        rest = [1] * (new - 1) + [-1] * (q.dim() - max(1, new))
        with graph.inserting_before(node):
            cases: Any = q.shape[0]
            if not isinstance(cases, int):
                cases = graph.call_function(torch.ops.aten.sym_size.int, (query, 0))
                cases.meta["val"] = q.shape[0]
            expanded = graph.call_method("expand", (mask, (cases, *rest)))
        expanded.meta = {**node.meta, "val": m.expand(q.shape[0], *rest)}
        node.replace_input_with(mask, expanded)
