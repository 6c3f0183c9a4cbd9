"""Numbers of TensorFlow's K-FAC for factors and blocks of single layers, in PyTorch's layout.

There averages begin at the identity and the first batch enters with a half; here they begin at the batch. The numbers
are those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.compiled.fisher_blocks import FisherBlock
from kfac_fx.fisher.groups import Stack
from kfac_fx.linalg.matrices import pi_correction
from kfac_fx.passes.matrix import Layout, MatrixForm
from kfac_fx.recording.taps import fewer_rows
from tests.runtime.collections_of_toys import collection
from tests.tables import pairs

Function = Callable[..., Any]


def t(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def block_of(
    function: Function, kind: str, params: Any, shapes: dict[str, Any], inputs: Tensor, grads: Tensor, **options: Any
) -> FisherBlock:
    """The statistics of the only layer of `function`, on these inputs and gradients of its output."""
    lc = collection(function, **shapes)
    (output,) = (node for node in lc.graph.nodes if node.op == "output")
    block: FisherBlock = getattr(lc, f"register_{kind}")(params, inputs=None, outputs=output.args[0], **options)
    block.register_inverse()
    block.instantiate_factors([[grads]], 0.0, [inputs])
    return block


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def with_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def biased(function: Function = F.conv2d, **options: Any) -> Function:
    return lambda x, w, b: function(x, w, b, **options)


def plain(function: Function = F.conv2d, **options: Any) -> Function:
    return lambda x, w: function(x, w, **options)


# --- factors --------------------------------------------------------------------------------------------------------

X = t([1, 2], [3, 4])
COLUMN = t(1, 2).view(2, 1, 1, 1)


@pytest.mark.parametrize(
    ("function", "params", "shapes", "inputs", "expected"),
    [
        (linear, "w", {"w": (1, 2)}, X, [[5, 7], [7, 10]]),
        (with_bias, ("w", "b"), {"w": (1, 2), "b": (1,)}, X, [[5, 7, 2], [7, 10, 3], [2, 3, 1]]),
        (plain(), "w", {"w": (1, 1, 1, 1)}, COLUMN, [[2.5]]),
        (biased(), ("w", "b"), {"w": (1, 1, 1, 1), "b": (1,)}, COLUMN, [[2.5, 1.5], [1.5, 1]]),
    ],
    ids=["linear", "linear, bias", "convolution", "convolution, bias"],
)
def test_input_factors(function: Function, params: Any, shapes: dict[str, Any], inputs: Tensor, expected: Any) -> None:
    kind = "fully_connected" if inputs.dim() == 2 else "conv2d"
    grads = torch.ones(len(inputs), 1, *inputs.shape[2:], dtype=torch.float64)
    block = block_of(function, kind, params, shapes, inputs, grads)
    torch.testing.assert_close(block.operator.factors["A"].value[0], t(*expected))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([[5, 7], [7, 10]], [[3, 3.5], [3.5, 5.5]]),
        ([[5, 7, 2], [7, 10, 3], [2, 3, 1]], [[3, 3.5, 1], [3.5, 5.5, 1.5], [1, 1.5, 1]]),
        ([[0.5, 1], [1, 2]], [[0.75, 0.5], [0.5, 1.5]]),
        ([[85, 93], [93, 102]], [[43, 46.5], [46.5, 51.5]]),
    ],
    ids=["inputs", "inputs with a bias", "generic parameters", "gradients of a convolution"],
)
def test_a_batch_that_enters_an_identity_with_a_half(batch: Any, expected: Any) -> None:
    """The original's own numbers: decay ½, beginning at the identity."""
    size = len(batch)
    stack = Stack.zeros(1, (size, size), torch.float64, torch.device("cpu"))
    for value in (torch.eye(size, dtype=torch.float64), t(*batch)):
        stack.update(value[None], torch.tensor([True]), 1.0, 1.0)
    torch.testing.assert_close(stack.value[0], t(*expected))


@pairs(("form", ["list", "folded", "with a dimension of time"]), ("bias", [False, True]))
def test_input_factors_of_several_uses_in_every_format(form: str, bias: bool) -> None:
    """The same rows as two uses of one case: [1, 2], then [3, 4]."""
    x = X.unsqueeze(1) if form != "folded" else X

    def each(x: Tensor, w: Tensor, *b: Tensor) -> Any:
        return [F.linear(case, w, *b) for case in x] if form == "list" else F.linear(x, w, *b)

    function = (lambda x, w, b: each(x, w, b)) if bias else (lambda x, w: each(x, w))
    lc = collection(function, torch.zeros(x.shape), **{"w": (1, 2), **({"b": (1,)} if bias else {})})
    outputs = ["linear", "linear_1"] if form == "list" else "linear"
    options = {} if form == "list" else {"num_uses": 2}
    block = lc.register_fully_connected_multi(("w", "b") if bias else "w", None, outputs, **options)
    grads = [torch.ones(1, 1).double()] * 2 if form == "list" else torch.ones(*x.shape[:-1], 1).double()
    block.instantiate_factors([[grads]], 0.0, [[*x] if form == "list" else x], cases=1)
    expected = [[5, 7, 2], [7, 10, 3], [2, 3, 1]] if bias else [[5, 7], [7, 10]]
    torch.testing.assert_close(block.operator.factors["A"].value[0], t(*expected))
    assert block.operator.factors["positions"].value == 2


@pytest.mark.parametrize(("rows", "columns", "kept"), [(10, 2, 2), (10, 8, 8), (3, 3, 3)])
def test_as_many_rows_are_sampled_as_there_are_columns(rows: int, columns: int, kept: int) -> None:
    """One row an input at most: ten patches of two columns leave two."""
    phase, positions = torch.tensor(0.3, dtype=torch.float64), torch.randn(2, rows // 2, columns)
    positions = positions if rows % 2 == 0 else torch.randn(1, rows, columns)
    found, _, scale = fewer_rows((1, 1), phase, positions.unsqueeze(2), None)
    assert found.shape[0] * found.shape[1] == kept and scale == rows / kept


def test_the_output_factor_of_a_convolution() -> None:
    """1, 2, ..., 16 as two images of two by two pixels with two channels."""
    grads = torch.arange(1.0, 17.0, dtype=torch.float64).view(2, 2, 2, 2).movedim(-1, 1)
    inputs = torch.randn(2, 3, 2, 2, dtype=torch.float64)
    block = block_of(plain(), "conv2d", "w", {"w": (2, 3, 1, 1)}, inputs, grads)
    torch.testing.assert_close(block.operator.factors["G"].value[0], t([85, 93], [93, 102]))
    assert block.operator.factors["positions"].value == 4


@pytest.mark.parametrize(
    ("ids", "expected"), [([0, 1, 4], [1 / 3, 1 / 3, 0, 0, 1 / 3]), ([0, 1, 4, 1], [0.25, 0.5, 0, 0, 0.25])]
)
@pytest.mark.parametrize("column", [False, True])
def test_the_diagonal_input_factor_of_ids(ids: list[int], expected: list[float], column: bool) -> None:
    x = torch.tensor(ids).unsqueeze(-1) if column else torch.tensor(ids)
    grads = torch.ones(*x.shape, 2, dtype=torch.float64)
    block = block_of(lambda x, w: F.embedding(x, w), "embedding", "w", {"w": (5, 2)}, x, grads)
    torch.testing.assert_close(block.operator.factors["A"].value[0], t(*expected))


def test_the_diagonal_input_factor_of_dense_rows() -> None:
    x = t([0, 0.3, 0.4], [1, 0, 0], [0.5, -1, 0.1])
    block = block_of(linear, "fully_connected", "w", {"w": (1, 3)}, x, torch.ones_like(x[:, :1]), approx="kron_in_diag")
    torch.testing.assert_close(block.operator.factors["A"].value[0], (x.mT @ x / 3).diagonal())


SAME = {"padding": 1, "stride": 2}
RANKS: dict[str, tuple[Function, str, tuple[int, ...], tuple[int, ...], int]] = {
    "corners of a cube": (plain(F.conv3d, **SAME), "convolution", (1, 27, 3, 3, 3), (1, 27, 3, 3, 3), 8),
    "pointwise": (plain(), "conv2d", (1, 9, 3, 3), (1, 9, 1, 1), 9),
    "every second row": (plain(stride=(2, 1)), "conv2d", (1, 9, 3, 3), (1, 9, 1, 1), 6),
    "dilated beyond the image": (plain(dilation=3, padding=3), "conv2d", (1, 2, 3, 3), (1, 2, 3, 3), 2),
}


@pytest.mark.parametrize("name", RANKS)
def test_the_rank_of_an_input_factor_is_the_number_of_its_patches(name: str) -> None:
    function, kind, image, kernel, rank = RANKS[name]
    x = torch.randn(image, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = torch.zeros(kernel, dtype=torch.float64)
    block = block_of(function, kind, "w", {"w": kernel}, x, torch.ones_like(function(x, w)))
    a = block.operator.factors["A"].value[0]
    assert a.shape == (w[0].numel(), w[0].numel()) and torch.linalg.matrix_rank(a) == rank


def test_the_rank_of_an_output_factor_is_the_number_of_its_positions() -> None:
    grads = torch.randn(1, 27, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = torch.zeros(1, 1, 3, 3, 3, dtype=torch.float64)
    block = block_of(plain(F.conv3d), "convolution", "w", {"w": (27, 1, 1, 1, 1)}, inputs, grads)
    assert torch.linalg.matrix_rank(block.operator.factors["G"].value[0]) == 27


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("approx", ["kron_sua", "kron_sua_centered"])
def test_uncorrelated_activations_of_two_channels(approx: str, bias: bool) -> None:
    """Images of three by three pixels under a kernel of two by two, damped by 0.03: with the mean, and without.

    Without it a bias keeps its own 1, which the original leaves out.
    """
    x = torch.rand(10, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = x.movedim(1, -1).reshape(-1, 2)
    mean = rows.mean(0)
    cov = rows.mT @ rows / 90 - torch.outer(mean, mean)
    m = torch.cat([mean.repeat_interleave(4) * (approx == "kron_sua"), torch.ones(int(bias)).double()])
    a = torch.block_diag(torch.kron(cov, torch.eye(4)), torch.zeros(int(bias), int(bias))) + torch.outer(m, m)
    shapes: dict[str, Any] = {"w": (1, 2, 2, 2)} | ({"b": (1,)} if bias else {})
    lc = collection(biased() if bias else plain(), **shapes)
    block = lc.register_conv2d(("w", "b") if bias else "w", outputs="conv2d", approx=approx)
    block.register_inverse()
    block.instantiate_factors([[torch.full((10, 1, 2, 2), 0.5**0.5).double()]], 0.03, [x])
    group = block.operator.group
    damping = group.split_damping()
    side_a, side_g = (damping[side].item() for side in (group.sides[1], group.sides[0]))
    assert side_a * side_g == pytest.approx(0.03 / 4)  # of four positions
    inputs = len(a)
    torch.testing.assert_close(group.mean_eigenvalue(group.right).item() * inputs, a.trace().item())
    columns = [
        block.multiply_inverse(group.unpack(unit.view(1, 1, 1, -1), {"w": X, "b": X})) for unit in torch.eye(inputs)
    ]
    inverse = torch.stack([group.pack(column).flatten() for column in columns])
    wanted = torch.linalg.inv(a + side_a * torch.eye(inputs)) / (0.5 + side_g) / 4
    torch.testing.assert_close(inverse, wanted)
    back = [group.pack(block.multiply(column)).flatten() for column in columns]
    torch.testing.assert_close(torch.stack(back), torch.eye(inputs, dtype=torch.float64))


# --- diagonal blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_the_diagonal_of_a_convolution_with_one_location_is_a_square(bias: bool) -> None:
    """Three by three by three inputs: 27 numbers, and one more with a bias."""
    x = torch.randn(1, 3, 3, 3, dtype=torch.float64)
    shapes: dict[str, Any] = {"w": (1, 3, 3, 3)} | ({"b": (1,)} if bias else {})
    params = ("w", "b") if bias else "w"
    function = biased() if bias else plain()
    block = block_of(function, "conv2d", params, shapes, x, 2 * torch.ones(1, 1, 1, 1).double(), approx="diagonal")
    row = torch.cat([x.flatten(), torch.ones(1, dtype=torch.float64)]) if bias else x.flatten()
    torch.testing.assert_close(block.full_fisher_block(), torch.diag((2 * row) ** 2))


def test_locations_add_up_before_they_are_squared() -> None:
    """One case of two locations, and two cases of eight by four pixels: divided by cases, not by locations."""
    x, grads = t([1, 3], [2, 4]).view(1, 2, 2, 1), t(1, -1).view(1, 1, 2, 1)
    diagonal, kron = (
        block_of(plain(), "conv2d", "w", {"w": (1, 2, 1, 1)}, x, grads, approx=approx)
        for approx in ("diagonal", "kron")
    )
    torch.testing.assert_close(diagonal.full_fisher_block(), torch.diag(t(4, 4)))
    torch.testing.assert_close(kron.full_fisher_block(), 2 * t([5, 7], [7, 10]))
    x, grads = (torch.randn(2, channels, 8, 4, dtype=torch.float64) for channels in (6, 3))
    block = block_of(plain(), "conv2d", "w", {"w": (3, 6, 1, 1)}, x, grads, approx="diagonal")
    expected = torch.einsum("nohw,nihw->noi", grads, x).square().sum(0) / 2
    torch.testing.assert_close(block.full_fisher_block().diagonal(), expected.flatten())
    vector = torch.randn(3, 6, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(block.multiply(vector).view(3, 6), expected * vector.view(3, 6))
    torch.testing.assert_close(block.multiply_inverse(vector).view(3, 6), vector.view(3, 6) / expected)


def test_a_depthwise_product_has_an_inverse_of_the_weight_s_shape() -> None:
    x, grads = (torch.randn(4, channels, 5, 5, dtype=torch.float64) for channels in (8, 16))
    block = block_of(plain(padding=1, groups=8), "depthwise_conv2d", "w", {"w": (16, 1, 3, 3)}, x, grads, approx="kron")
    assert block.multiply_inverse(torch.ones(16, 1, 3, 3, dtype=torch.float64)).shape == (16, 1, 3, 3)


# --- matrices -------------------------------------------------------------------------------------------------------


def test_weight_and_bias_are_one_matrix() -> None:
    """The original appends the bias as the last row of [in, out]; here it is the last column of [out, in]."""
    form = MatrixForm(("w", Layout((2, 2)).reshape((1, 2, 2))), ("b", Layout((2,)).reshape((1, 2))))
    w, b = t([1, 2], [4, 3]).mT, t(1, 2)
    packed = form.pack({"w": w, "b": b})
    torch.testing.assert_close(packed[0].mT, t([1, 2], [4, 3], [1, 2]))
    back = form.unpack(t([5, 4], [3, 2], [1, 0]).mT[None])
    torch.testing.assert_close((back["w"].mT, back["b"]), (t([5, 4], [3, 2]), t(1, 0)))
    kernel = MatrixForm(
        ("w", Layout((4, 3, 2, 2)).rearrange("o c h w -> 1 o (c h w)")), ("b", Layout((4,)).reshape((1, 4)))
    )
    assert kernel.shape == (1, 4, 13)


def test_pi_of_a_diagonal_and_a_dense_side() -> None:
    """tr diag(1, 2, 0, 1) / 4 = tr ones(2, 2) / 2."""
    left, right = t(1, 2, 0, 1).mean(), torch.ones(2, 2).double().trace() / 2
    assert pi_correction(left, right) == 1


@pytest.mark.parametrize(("cov", "damping", "exp"), [([[6, 2], [2, 4]], 0.5, 2.0), ([[5, 2], [2, 4]], 0.0, -1.0)])
def test_powers_of_a_damped_matrix(cov: Any, damping: float, exp: float) -> None:
    """One side is the number 1, so that the other is the whole block."""
    rows = torch.linalg.cholesky(2 * t(*cov)).mT
    lc = collection(linear, w=(1, 2))
    block = lc.register_fully_connected("w", None, "linear")
    block.register_matpower(exp)
    block.instantiate_factors([[torch.ones(2, 1, dtype=torch.float64)]], damping, [rows])
    a, g = block.operator.group.split_damping().values()
    factor = t(*cov) + a.squeeze() * torch.eye(2, dtype=torch.float64)
    expected = torch.linalg.matrix_power(factor, int(exp)) * (1 + g.squeeze()) ** exp
    columns = [block.multiply_matpower(unit[None], exp)[0] for unit in torch.eye(2, dtype=torch.float64)]
    torch.testing.assert_close(torch.stack(columns), expected)
