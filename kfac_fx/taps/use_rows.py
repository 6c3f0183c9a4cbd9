"""What makes the rows of a use: its layer's declaration, and all that a use may have beside it, in one function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from kfac_fx.linalg.matrices import bordered
from kfac_fx.passes.ir import UNCORRELATED, Registration, Use, tensor_attrs
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.matching.gathers import ENTRIES, of_table
from kfac_fx.passes.matching.linear_maps import MAP, of_elements
from kfac_fx.passes.words.pieces import Region
from kfac_fx.passes.words.uses import JACOBIAN
from kfac_fx.taps.factored import factored
from kfac_fx.taps.flat_rows import of_cases
from kfac_fx.taps.sloped import slopes_of

BothRows = Callable[..., tuple[Tensor, Tensor]]


def both_rows(registration: Registration, use: Use, layer: Layer) -> BothRows:
    """The function of one use: (gradient of the output, input, tensor attributes) -> (rows, gradient rows), with sides
    changed for a transposed use. It closes over functions and literals only, so that a compiled graph can hold it."""
    assert registration.matrix is not None, "bug in kfac_fx: rows of a generic registration"
    form = layer.forms[use.form]
    make_rows, make_grad_rows = form.rows, form.grad_rows
    if registration.approximation in UNCORRELATED:
        assert form.pixels is not None, f"bug in kfac_fx: {registration} has no pixels"
        make_rows = form.pixels
    literals = {key: value for key, value in use.attrs.items() if not isinstance(value, fx.Node)}
    names = tuple(tensor_attrs(use))
    batch_dim, free = (use.batch_dim or 0) if form.leading else 0, use.free
    weightless, transposed = registration.matrix.weight is None, use.transposed
    region, (by, grad_by), sloped = use.region, scales(use), slopes_of(registration, use)
    gathered, mapped = use.gathered, use.mapped
    factor = None if use.factor is None else factored(use.factor)
    whole = None if use.flat is None else of_cases(use.flat)

    def both(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        attrs = {**literals, **dict(zip(names, tensors, strict=True))}
        if batch_dim:
            output_grad = output_grad.movedim(batch_dim, 0)
            if input.dim() > batch_dim:
                input = input.movedim(batch_dim, 0)
        rows, grad_rows = make_rows(input, attrs), make_grad_rows(output_grad, attrs)
        if gathered is not None:
            rows, grad_rows = of_table(rows, grad_rows, attrs[ENTRIES], gathered)
        if mapped is not None:
            rows, grad_rows = of_elements(rows, grad_rows, attrs[MAP], mapped)
        if region is not None:
            rows, grad_rows = within(rows, grad_rows, region)
        if grad_by != 1.0:
            grad_rows = grad_rows * grad_by
        if by != 1.0:
            rows = rows * by
        if factor is not None:
            rows, grad_rows = factor((rows, grad_rows), attrs)
        if sloped is not None:
            rows, grad_rows = sloped((rows, grad_rows), attrs)
        if weightless:
            rows = (rows if rows.is_floating_point() else grad_rows)[..., :0]
        if free:
            rows, grad_rows = shared_by_cases(rows, grad_rows)
        if whole is not None:
            return whole(rows, grad_rows, attrs.get(JACOBIAN))
        return (grad_rows, rows) if transposed else (rows, grad_rows)

    return both


def moment_and_grad_rows(registration: Registration, use: Use, layer: Layer) -> BothRows | None:
    """The function of one use: (gradient of the output, input) -> (A of its layer's rows, gradient rows), where the
    layer declares a second moment and nothing else is done to the rows. None elsewhere."""
    assert registration.matrix is not None, "bug in kfac_fx: rows of a generic registration"
    form, (by, grad_by) = layer.forms[use.form], scales(use)
    whole = use.region is None and by == 1.0 and slopes_of(registration, use) is None and not tensor_attrs(use)
    plain = not (
        use.free or use.transposed or use.flat or registration.approximation in UNCORRELATED or registration.patch_mask
    )
    if form.second_moment is None or registration.matrix.weight is None or not (whole and plain):
        return None
    find, make_grad_rows, attrs = form.second_moment, form.grad_rows, dict(use.attrs)
    bias = registration.rows[1]

    def found(output_grad: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
        grad_rows = make_grad_rows(output_grad, attrs)
        with torch.autocast(input.device.type, enabled=False):
            body, total = find(input.to(torch.promote_types(input.dtype, torch.float32)), attrs)
            count = body.new_full((len(body),), grad_rows.shape[0] * grad_rows.shape[1])
            return bordered(body, total, count) if bias else body, grad_rows * grad_by if grad_by != 1.0 else grad_rows

    return found


def shared_by_cases(rows: Tensor, grad_rows: Tensor) -> tuple[Tensor, Tensor]:
    """[1, M, ...] both: what does not see the batch has positions only."""
    rows = rows.expand(grad_rows.shape[0], *rows.shape[1:])
    return rows.flatten(0, 1).unsqueeze(0), grad_rows.flatten(0, 1).unsqueeze(0)


def with_patch_mask(both: BothRows) -> BothRows:
    """With rows that are multiplied with the last of the attributes."""

    def masked(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        rows, grad_rows = both(output_grad, input, *tensors[:-1])
        return rows * tensors[-1].to(rows), grad_rows

    return masked


def scales(use: Use) -> tuple[float, float]:
    """Of the rows and the gradient rows of a use that sees multiples of its parameters: with `W = a V` and `b = c β`,
    the gradient of `[V, β]` is `Σ c d [(a / c) r, 1]ᵀ`."""
    roles = {role: bound.scale for role, bound in use.parameters.items()}
    bias = roles.get("bias", roles.get("weight", 1.0))
    return roles.get("weight", bias) / bias, bias


def within(rows: Tensor, grad_rows: Tensor, region: Region) -> tuple[Tensor, Tensor]:
    """What of the rows belongs to a part of the matrix: its groups and inputs, and its groups and outputs."""
    groups, outputs, inputs = (slice(*ends) for ends in region)
    grad_rows = grad_rows[:, :, groups, outputs] if grad_rows.dim() == 4 else grad_rows[..., outputs]
    if rows.is_floating_point():
        return rows[:, :, groups, inputs] if rows.dim() == 4 else rows[..., inputs], grad_rows
    inside = (rows >= inputs.start) & (rows < inputs.stop)
    return torch.where(inside, rows - inputs.start, -1), grad_rows
