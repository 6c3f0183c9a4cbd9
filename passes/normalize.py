"""One spelling for every operation, so that matchers see one language. Values never change.

Before                                   After
    aten.linear.default(x, w)                F.linear(x, w, None)
    x.relu()                                 torch.relu(x)
    operator.add(b, y), b a parameter        torch.add(y, b)
    b - y                                    torch.add(torch.mul(y, -1.0), b)
    self.bn(x)                               F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-05)
    F.relu(x, inplace=True)                  torch.relu(x), and later readers of x read the result
    x[:, 0].copy_(y), x is read later        w = x[:, 0].copy_(y), and later readers of x read written(x, w)

Parameters are read under their canonical names, once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx, nn

from .graphs.edit import numbers
from .graphs.inplace import functional, sequence
from .graphs.operations import has_effect
from .graphs.spelling import order_operands, respell, spell_native, subtract_by_adding
from .ir import Program
from .layers.experts import route
from .matching.elements import expand_masks, mark_tables, note_elements


def normalize(program: Program) -> Program:
    """See the module's docstring."""
    graph, copies = fx.Graph(), {}
    read: dict[str, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            name = program.aliases.get(str(node.target), str(node.target))
            if name not in read:
                read[name] = graph.get_attr(name)
                read[name].meta = dict(node.meta)
            copies[node] = read[name]
        elif node.op == "call_module":
            copies[node] = inline(graph, node, program.root.get_submodule(str(node.target)), copies)
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.eliminate_dead_code(is_impure_node=has_effect)
    functional(graph)
    sequence(graph)
    spell_native(graph)
    respell(graph)
    route(graph)
    subtract_by_adding(graph, program.parameters)
    order_operands(graph, program.parameters)
    numbers(graph, program.root)
    expand_masks(graph, program.parameters)
    mark_tables(graph, program.parameters)
    note_elements(graph, program.parameters, program.root)
    losses = tuple(copies.get(node, node) for node in program.outputs)
    return program.but(graph=graph, outputs=losses)


def inline(graph: fx.Graph, node: fx.Node, module: nn.Module, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """A call of a batch or instance norm module as the functional call that its forward makes."""
    operand = copies[node.args[0]] if node.args else copies[next(iter(node.kwargs.values()))]  # type: ignore[index]

    def held(name: str) -> fx.Node | None:
        return graph.get_attr(f"{node.target}.{name}") if getattr(module, name, None) is not None else None

    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        stats = module.training or not module.track_running_stats
        arguments = (
            held("running_mean"),
            held("running_var"),
            held("weight"),
            held("bias"),
            stats,
            module.momentum,
            module.eps,
        )
        return graph.call_function(F.instance_norm, (operand, *arguments))
    assert isinstance(module, nn.modules.batchnorm._BatchNorm), (
        f"bug in kfac_fx: {type(module).__name__} was left whole"
    )
    training = module.training or (module.running_mean is None and module.running_var is None)
    if module.training and module.track_running_stats and module.num_batches_tracked is not None:
        graph.call_function(torch.ops.aten.add_.Tensor, (held("num_batches_tracked"), 1))
    used = not module.training or module.track_running_stats
    mean, var = (held("running_mean"), held("running_var")) if used else (None, None)
    momentum = 0.0 if module.momentum is None else module.momentum  # None: the capture's `effects` say it
    return graph.call_function(
        F.batch_norm, (operand, mean, var, held("weight"), held("bias"), training, momentum, module.eps)
    )
