"""The grammar of a Program, checked between passes. What breaks it is our fault, and is named with the pass."""

from __future__ import annotations

from torch import fx

from .ir import Program, Use


def verify(program: Program, after: str) -> Program:
    """Returns `program` if it is well-formed; AssertionError names the pass and what it left behind."""
    program.graph.lint()
    nodes = set(program.graph.nodes)
    for use in program.matches:
        check_use(use, program, nodes, after)
    seen: set[str] = set()
    for one in program.registrations:
        for name in one.parameters:
            assert name in program.shapes, f"bug in kfac_fx: {after} registered {name}, no parameter of the model"
            assert name not in seen, f"bug in kfac_fx: {after} registered {name} twice"
            seen.add(name)
        assert one.generic == (not one.uses), f"bug in kfac_fx: {after} left {one} with the wrong number of uses"
        for use in one.uses:
            check_use(use, program, nodes, after)
    for name in program.unused:
        assert name not in seen, f"bug in kfac_fx: {after} calls {name} unused and registered it"
    for node in program.outputs:
        assert node in nodes, f"bug in kfac_fx: {after} left the output {node.name} behind"
    return program


def check_use(use: Use, program: Program, nodes: set[fx.Node], after: str) -> None:
    assert use.layer in program.layers, f"bug in kfac_fx: {after} left a use of the unknown layer {use.layer}"
    assert use.input in nodes, f"bug in kfac_fx: {after} left {use} without its input {use.input.name}"
    assert use.output in nodes, f"bug in kfac_fx: {after} left {use} without its output {use.output.name}"
    some = use.parameters or use.made
    assert some, f"bug in kfac_fx: {after} left {use.layer} at {use.output.name} without parameters"
    for bound in use.parameters.values():
        name = bound.parameter
        assert name in program.shapes, f"bug in kfac_fx: {after} bound {name}, no parameter of the model"
        shape = program.shapes[name]
        assert bound.used.shape == shape, (
            f"bug in kfac_fx: {after} lays out {name} from {bound.used.shape}, it is {shape}"
        )
