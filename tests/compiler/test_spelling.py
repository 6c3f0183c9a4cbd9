"""One spelling for every operation, also for those that ATen writes itself."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx.passes.graphs.operations import SPELLED_OUT, op_name
from kfac_fx.passes.graphs.spelling import public, respell, spell_native
from kfac_fx.passes.match import returned
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.trace import trace_model
from tests.compiler.toy import Toy, before

X, W, B, IDS = torch.randn(4, 5), torch.randn(3, 5), torch.randn(3), torch.randint(3, (4,))
IMAGE, KERNEL = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)

SAME: list[tuple[Tensor, list[Callable[[Any], Any]]]] = [
    (X, [lambda x: F.linear(x, W), lambda x: F.linear(input=x, weight=W), lambda x: F.linear(x, W, bias=None)]),
    (X, [lambda x: x @ W.T, lambda x: torch.matmul(x, W.T), lambda x: x.mm(W.T), lambda x: torch.mm(x, W.T)]),
    (X, [lambda x: x @ W.T, lambda x: torch.matmul(input=x, other=W.T), lambda x: torch.matmul(x, other=W.T)]),
    (X, [lambda x: torch.relu(x), lambda x: x.relu(), lambda x: F.relu(x)]),
    (X, [lambda x: x + 1, lambda x: 1 + x, lambda x: x.add(1), lambda x: torch.add(x, 1)]),
    (X, [lambda x: x + 1, lambda x: torch.add(input=x, other=1), lambda x: x.add(other=1)]),
    (X, [lambda x: torch.cat([x, x]), lambda x: torch.cat(tensors=[x, x])]),
    (X, [lambda x: torch.rsub(x, 1), lambda x: torch.rsub(input=x, other=1), lambda x: 1 - x]),
    (X, [lambda x: 2 * x, lambda x: x.mul(2), lambda x: torch.multiply(x, 2), lambda x: x.multiply(2)]),
    (X, [lambda x: x / X, lambda x: torch.divide(x, X), lambda x: x.true_divide(X)]),
    (X, [lambda x: x - X, lambda x: torch.subtract(x, X), lambda x: x.subtract(X)]),
    (X, [lambda x: -x, lambda x: torch.negative(x), lambda x: x.negative()]),
    (X, [lambda x: x.abs(), lambda x: torch.absolute(x), lambda x: x.absolute()]),
    (X, [lambda x: x.clamp(0, 1), lambda x: torch.clip(x, 0, 1), lambda x: x.clip(min=0, max=1)]),
    (X, [lambda x: x @ W.T, lambda x: torch.linalg.matmul(x, W.T)]),
    (X, [lambda x: x.transpose(0, 1), lambda x: x.swapaxes(0, 1), lambda x: torch.swapdims(x, 0, 1)]),
    (X, [lambda x: x.movedim(0, 1), lambda x: torch.moveaxis(x, 0, 1)]),
    (X[0], [lambda x: torch.outer(x, B), lambda x: torch.ger(x, B), lambda x: x.ger(B)]),
    (X, [lambda x: torch.sigmoid(x), lambda x: torch.special.expit(x)]),
    (X, [lambda x: x.softmax(1), lambda x: torch.special.softmax(x, 1)]),
    (X, [lambda x: x.log_softmax(1), lambda x: torch.special.log_softmax(x, 1)]),
    (X, [lambda x: x.logsumexp(1), lambda x: torch.special.logsumexp(x, 1)]),
    (X, [lambda x: x.mean(1), lambda x: torch.mean(x, 1), lambda x: x.mean([1]), lambda x: torch.mean(input=x, dim=1)]),
    (X, [lambda x: torch.einsum("ij,kj->ik", x, W), lambda x: torch.einsum("ij,kj->ik", [x, W])]),
    (X, [lambda x: torch.einsum("ij->ji", x), lambda x: torch.einsum("ij->ji", [x])]),
    (X, [lambda x: F.layer_norm(x, (5,)), lambda x: F.layer_norm(x, [5], eps=1e-5)]),
    (X, [lambda x: F.pad(x, (0, 1, 1, -1)), lambda x: F.pad(x, pad=[0, 1, 1, -1], mode="constant", value=0.0)]),
    (X, [lambda x: F.pad(x, (1, 0), value=2.0), lambda x: F.pad(input=x, pad=(1, 0), mode="constant", value=2.0)]),
    (IMAGE, [lambda x: F.pad(x, (1, 1, 0, 1), "reflect"), lambda x: F.pad(x, [1, 1, 0, 1], mode="reflect")]),
    (IDS, [lambda x: F.embedding(x, W), lambda x: F.embedding(x, W, padding_idx=None)]),
    (IMAGE, [lambda x: F.conv2d(x, KERNEL, padding=1), lambda x: torch.conv2d(x, KERNEL, None, 1, 1)]),
    (X, [lambda x: torch.fft.fft(x).real, lambda x: torch.real(torch.fft.fft(x))]),
    (X, [lambda x: torch.fft.fft(x).imag, lambda x: torch.imag(torch.fft.fft(x))]),
    (X, [lambda x: torch.fft.fft(x).conj(), lambda x: torch.conj(torch.fft.fft(x))]),  # the exported graph has _conj
    *((X, [transposed]) for transposed in (lambda x: x.T, lambda x: x.mT, lambda x: x.H, lambda x: x.mH)),
    (X, [lambda x: F.mse_loss(x, X, reduction="sum")]),
    (X, [lambda x: F.cross_entropy(x, IDS), lambda x: F.cross_entropy(x, IDS, ignore_index=-100)]),
]


def last(function: Callable[[Any], Any], *inputs: Tensor) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The operation behind the output, with what it is given; other nodes by the number of their place in the graph."""
    graph = before("find_losses", Toy(function), *inputs).graph
    (output,) = (node for node in graph.nodes if node.op == "output")
    node = output.all_input_nodes[0]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.op if one.op != "get_attr" else "held")
    return node.target, tuple(tuple(a) if isinstance(a, list) else a for a in args), dict(kwargs)


CUBE = torch.randn(3, 4, 5)


class Indexed(nn.Module):
    """A model that reads its parameter at an index."""

    def __init__(self, index: Any) -> None:
        super().__init__()
        self.weight, self.index = nn.Parameter(CUBE.clone()), index

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * self.weight[self.index]


@pytest.mark.parametrize("index", [0, -1, (0, 1), (slice(None), 2), (slice(None), -1, 3), (1, 2, 3)], ids=str)
def test_a_selection_has_one_spelling_in_both_graphs(index: Any) -> None:
    """An integer index was `getitem` without example inputs, and `select` with them."""
    calls: list[list[Any]] = []
    for inputs in (None, (X,)):
        graph = normalize(trace_model(Indexed(index), inputs).program).graph
        node: Any
        (node,) = (node.args[1] for node in graph.nodes if op_name(node) == "mul")
        chain: list[Any] = []
        calls.append(chain)
        while node.op != "get_attr":
            chain.insert(0, (node.target, *node.args[1:]))
            node = node.args[0]
        value: Any = CUBE
        for target, dim, place in chain:
            assert target is torch.select
            value = torch.select(value, dim, place)
        assert torch.equal(value, CUBE[index])
    assert calls[0] == calls[1]


def test_an_index_of_a_list_is_no_selection() -> None:
    first = before("find_losses", Toy(lambda x: torch.chunk(x, 2)[0] + x.split(2)[1] + x.max(1)[0].sum())).graph
    assert [op_name(node) for node in first.nodes].count("getitem") == 3


def reduced(name: str) -> list[Callable[[Any], Any]]:
    """The spellings of a reduction along the last dimension."""
    return [
        lambda x: getattr(x, name)(dim=-1),
        lambda x: getattr(x, name)(dim=[-1]),
        lambda x: getattr(x, name)(dim=(-1,)),
        lambda x: getattr(torch, name)(x, dim=-1, keepdim=False),
        lambda x: getattr(torch, name)(input=x, dim=-1),
    ]


def along(name: str) -> list[Callable[[Any], Any]]:
    """The spellings of an operation along the last dimension."""
    return [
        lambda x: getattr(x, name)(-1),
        lambda x: getattr(x, name)(dim=-1),
        lambda x: getattr(torch, name)(x, -1),
        lambda x: getattr(torch, name)(x, dim=-1),
        lambda x: getattr(torch, name)(input=x, dim=-1),
    ]


def kept(name: str) -> list[Callable[[Any], Any]]:
    """The spellings of a reduction that keeps the dimension."""
    return [
        lambda x: getattr(x, name)(dim=-1, keepdim=True),
        lambda x: getattr(torch, name)(x, dim=[-1], keepdim=True),
        lambda x: getattr(x, name)(keepdim=True, dim=(-1,)),
    ]


ALONG: dict[str, list[Callable[[Any], Any]]] = {
    **{name: along(name) for name in ("softmax", "log_softmax", "squeeze", "unsqueeze", "cumsum", "prod", "argmax")},
    **{name: reduced(name) + along(name) for name in ("sum", "mean", "amax", "amin", "var", "std", "logsumexp")},
    **{f"{name}, kept": kept(name) for name in ("sum", "mean", "amax", "var", "std", "norm", "logsumexp")},
    "several": [lambda x: x.sum((0, 1)), lambda x: x.sum([0, 1]), lambda x: x.sum(dim=(0, 1))],
    "norm": [
        *reduced("norm"),
        lambda x: x.norm(2, -1),
        lambda x: x.norm(p=2, dim=-1),
        lambda x: torch.linalg.vector_norm(x, dim=-1),
        lambda x: torch.linalg.vector_norm(x, 2, -1),
    ],
    "biased": [
        lambda x: x.var(-1, unbiased=False),
        lambda x: x.var(-1, False),
        lambda x: x.var(unbiased=False, dim=-1),
    ],
    "correction": [lambda x: x.var(-1, correction=0), lambda x: x.var(correction=0, dim=[-1])],
    "F.softmax": [*along("softmax"), lambda x: F.softmax(x, dim=-1), lambda x: F.softmax(x, -1)],
    "flatten": [
        lambda x: x.flatten(1),
        lambda x: x.flatten(1, -1),
        lambda x: x.flatten(start_dim=1),
        lambda x: torch.flatten(x, 1, end_dim=-1),
    ],
    "transpose": [lambda x: x.transpose(0, 1), lambda x: torch.transpose(x, dim0=0, dim1=1)],
    "permute": [lambda x: x.permute(1, 0), lambda x: x.permute((1, 0)), lambda x: torch.permute(x, dims=[1, 0])],
    "stack": [lambda x: torch.stack([x, x], -1), lambda x: torch.stack([x, x], dim=-1)],
    "cat": [lambda x: torch.cat([x, x], -1), lambda x: torch.cat(dim=-1, tensors=(x, x))],
    "max": [lambda x: x.max(-1)[0], lambda x: x.max(dim=-1)[0], lambda x: torch.max(x, dim=-1, keepdim=False)[0]],
}


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize("name", ALONG)
def test_every_spelling_of_a_dimension_is_one_in_graphs_and_in_forms(name: str, exported: bool) -> None:
    """Whether there are example inputs does not decide which spelling of a form is right."""
    written = [*map(in_form, ALONG[name]), *in_model(ALONG[name], exported)]
    assert written == written[:1] * len(written)


def in_form(spelled: Callable[[Any], Any]) -> Any:
    """The last operation of a layer's form."""

    def form(x: Any, *, weight: Any) -> Any:
        return spelled(torch.mul(x, weight).cos())

    return written_as(returned(form, ("weight",), len(SPELLED_OUT)))


def in_model(spellings: list[Callable[[Any], Any]], exported: bool) -> list[Any]:
    """The last operations of a model that has all these spellings."""
    model = Toy(lambda x, w: [spelled(torch.mul(x, w).cos()) for spelled in spellings], w=(5,))
    graph = before("find_losses", model, *([X] if exported else [])).graph
    (output,) = (node for node in graph.nodes if node.op == "output")
    assert len(output.all_input_nodes) == len(spellings)
    return [written_as(node) for node in output.all_input_nodes]


def written_as(node: fx.Node) -> Any:
    """The function and the arguments of a node, with the operations of other nodes, and with tuples for lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return op_name(value)
        return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value

    return node.target, plain(node.args), {key: plain(value) for key, value in node.kwargs.items()}


def test_a_call_that_fits_no_overload_stays_as_it_is() -> None:
    def computed(x: Tensor, size: int) -> Tensor:
        return torch.sum(x, dim=size - 1)

    graph = fx.Tracer().trace(computed)  # type: ignore[arg-type]
    before_it = [(node.args, node.kwargs) for node in graph.nodes]
    respell(graph)
    assert [(node.args, node.kwargs) for node in graph.nodes] == before_it


@pytest.mark.parametrize(("x", "functions"), SAME)
def test_all_spellings_are_one(x: Tensor, functions: list[Callable[[Any], Any]]) -> None:
    symbolic = [last(function) for function in functions]
    assert symbolic == symbolic[:1] * len(functions)
    exported = [last(function, x) for function in functions]
    assert exported == exported[:1] * len(functions)
    assert symbolic[0][0] is exported[0][0] and symbolic[0][2] == exported[0][2] == {}


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: F.conv2d(x, KERNEL, padding="same", dilation=2), IMAGE),
        (lambda x: F.conv_transpose2d(x, KERNEL.mT.transpose(0, 1), stride=2, dilation=2), IMAGE),
        (lambda x: F.batch_norm(x, None, None, training=True, eps=1e-3), IMAGE),
        (lambda x: F.group_norm(x, 3, eps=1e-3), IMAGE),
        (lambda x: F.instance_norm(x, eps=1e-3), IMAGE),
        (lambda x: F.rms_norm(x, (5,)), X),
        (lambda x: torch.addmm(B, x, W.T), X),
        (lambda x: torch.addmm(B, x, W.T, beta=0.5), X),
        (lambda x: torch.baddbmm(B, x.unsqueeze(0), W.T.unsqueeze(0)), X),
        (lambda x: torch.baddbmm(B, x.unsqueeze(0), W.T.unsqueeze(0), beta=0.5), X),
        (lambda x: torch.addbmm(B, x.unsqueeze(0), W.T.unsqueeze(0), alpha=0.5), X),
        (lambda x: torch.tensordot(x, W.T, 1), X),
        (lambda x: torch.tensordot(x, W, dims=([1], [1])), X),
        (lambda x: F.embedding(x, W, padding_idx=-1), IDS),
        (lambda x: F.embedding(x, W, scale_grad_by_freq=True), IDS),
        (lambda x: F.embedding_bag(x[:, None], W, mode="sum"), IDS),
        (lambda x: F.binary_cross_entropy_with_logits(x, X.sigmoid(), pos_weight=torch.ones(5), reduction="none"), X),
        (lambda x: F.cross_entropy(x, IDS, label_smoothing=0.1, reduction="sum"), X),
        (lambda x: F.mse_loss(x, X, reduction="none"), X),
        (lambda x: torch.sub(x, x.flip(0), alpha=2), X),
        (lambda x: x.reshape(2, 2, 5).permute(2, 0, 1).flip(0, 1).tile(2, 1, 1), X),
        (lambda x: x.reshape((2, 10)).permute([1, 0]).sum(0).roll(1), X),
        (lambda x: x.movedim(0, 1).expand(2, -1, -1).repeat(1, 2, 1).squeeze(), X),
        (lambda x: F.softmax(x, dim=-1).sum(-1, keepdim=True), X),
        (lambda x: torch.fft.rfft(x).real, X),
        (lambda x: x.norm(dim=-1) + x.norm(3, 1) + torch.norm(x) + x.norm(p=2.0), X),
        (lambda x: torch.norm(x, dim=(0, 1), keepdim=True) + torch.norm(x, "nuc"), X),
        (lambda x: F.avg_pool2d(x, 2, padding=1) + F.max_pool2d(x, 2, 2, padding=1), IMAGE),
        (lambda x: torch.var(x, dim=-1, keepdim=True) + x.std(unbiased=False) + x.var(correction=0, dim=[0]), X),
        (lambda x: torch.where(condition=x > 0, input=x, other=-x), X),  # the operands are not the first arguments
        (lambda x: torch.ops.aten.index_put.default(x, [None, torch.tensor([2, 0])], x[:, 3:]), X),
        (lambda x: F.pad(x, (0, -1, 1, -1)).sum() * F.pad(x, (1, 0), value=2.0) + F.pad(x, (1, 0), "replicate"), X),
        (lambda x: x[:, torch.tensor([3, 1])], X),
    ],
)
@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
def test_values_never_change(function: Callable[[Any], Any], x: Tensor, exported: bool) -> None:
    model = Toy(function)
    traced = trace_model(model, (x,) if exported else None)
    program = before("find_losses", model, *([x] if exported else []))
    got = traced.unflatten(fx.GraphModule(program.root, program.graph)(x))
    torch.testing.assert_close(got, function(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", SPELLED_OUT)
def test_what_is_spelled_out_gets_every_argument_by_position(name: str) -> None:
    function, defaults = SPELLED_OUT[name]
    graph = fx.Graph()
    given = {key: graph.placeholder(key) for key in list(defaults)[:3]}
    graph.output(graph.call_function(function, (), given))
    respell(graph)
    (call,) = (node for node in graph.nodes if node.op == "call_function")
    assert call.args == (*given.values(), *list(defaults.values())[3:]) and call.kwargs == {}


def test_sums_and_products_begin_with_what_depends_on_the_batch() -> None:
    def shuffled(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return w + x, w * x.exp(), (2 * w) * x, w + torch.ones(5), 1 + w

    graph = before("find_losses", Toy(shuffled, w=(5,)), X).graph
    sums = [node for node in graph.nodes if node.target in (torch.add, torch.mul)]
    first = [str(node.args[0]) for node in sums]
    assert first == ["x", "exp", "w", "x", "w", "w"]


def test_operations_of_the_same_name_are_told_apart() -> None:
    assert public("relu") is torch.relu and public("fft_rfft") is torch.fft.rfft
    assert public("dropout1d") is None and public("no_such_operation") is None
    graph = before("find_losses", Toy(lambda x: torch.add(x, x, alpha=2))).graph
    (call,) = (node for node in graph.nodes if node.op == "call_function")
    assert call.kwargs == {"alpha": 2}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_constructors_of_sparse_tensors_keep_their_arguments() -> None:
    """As ATen's overloads have them, which torch's functions of the same names do not take."""

    def scattered(x: Tensor) -> Tensor:
        return x + torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 3]]), x[0, :2], (4, 5)).to_dense()

    program = before("find_losses", Toy(scattered), X)
    (got,) = fx.GraphModule(program.root, program.graph)(X)
    torch.testing.assert_close(got, scattered(X), rtol=0, atol=0)
    assert public("sparse_coo_tensor") is None


IMAGES = torch.randn(3, 4, 6, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ConvTranspose2d(6, 4, 2, 2)
        self.groups, self.batch = nn.GroupNorm(2, 4), nn.BatchNorm2d(4, track_running_stats=False)
        self.layer, self.head = nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(self.batch(self.groups(self.up(self.conv(x)))))
        y: Tensor = self.head(h).mean((1, 2))
        return y


def decomposed(model: nn.Module, x: Tensor = IMAGES) -> fx.GraphModule:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # of torch's own making
        return torch.export.export(model, (x,), strict=False).run_decompositions().module()


def test_a_decomposed_model_has_the_registrations_of_the_model() -> None:
    net = kfac_fx.compile(decomposed(Net()), (IMAGES,), loss="normal")
    layers = {registration.parameters[0].rpartition(".")[0]: registration.layer for registration in net.registrations}
    assert layers == {
        "conv": "conv2d", "up": "conv_transpose2d", "groups": "group_norm", "batch": "batch_norm",
        "layer": "layer_norm", "head": "linear",
    }  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [
        nn.Conv1d(4, 6, 3, padding=1, dilation=2),
        nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1),
        nn.Conv3d(4, 2, 1),
        nn.GroupNorm(2, 4),
        nn.LayerNorm((6, 8)),
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4).eval(),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4, affine=True),
    ],
    ids=str,
)
def test_values_and_statistics_stay_the_same(model: nn.Module) -> None:
    x = IMAGES[:, :, 0] if "1d" in str(model) else IMAGES[:, :, None] if "3d" in str(model) else IMAGES
    training = model.training
    module = decomposed(nn.Sequential(model), x)
    program = normalize(trace_model(module, (x,)).program)
    assert not any("native" in str(n.target) or "convolution" in str(n.target) for n in reading(program.graph))
    alike = copy.deepcopy(model).train(training)
    (got,) = fx.GraphModule(program.root, program.graph)(x)
    assert torch.equal(got, alike(x))
    left = {name.removeprefix("0."): value for name, value in module.state_dict().items()}
    torch.testing.assert_close(left, dict(alike.state_dict()), rtol=0, atol=0)


def reading(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that read parameters."""
    parameters = [node for node in graph.nodes if str(node.target).endswith(("weight", "bias"))]
    return [user for node in parameters for user in node.users]


def test_a_norm_whose_statistics_are_read_is_left() -> None:
    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y, mean, _ = torch.native_layer_norm(x, [4], w, b, 1e-5)
        return y + mean

    graph = fx.symbolic_trace(norm).graph
    before = str(graph)
    spell_native(graph)
    assert str(graph) == before


def test_padding_of_what_is_not_transposed_is_left() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    graph.output(graph.call_function(torch.ops.aten.convolution.default, (x, w, None, [1], [0], [1], False, [1], 1)))
    before = str(graph)
    spell_native(graph)
    assert str(graph) == before


def test_sizes_of_an_expansion_may_be_a_keyword() -> None:
    program = before("find_losses", Toy(lambda x: x.unsqueeze(1).expand(size=(4, 2, 5))))
    assert torch.equal(fx.GraphModule(program.root, program.graph)(X), X.unsqueeze(1).expand(4, 2, 5))


@pytest.fixture
def torch_of_another_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch as torch_geometric leaves it: a function is one in Python, which branches on its arguments."""
    original = torch.index_select

    def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
        if dim >= input.dim():
            raise IndexError("Dimension out of range")
        return original(input, dim, index)

    public.cache_clear()
    returned.cache_clear()
    monkeypatch.setattr(torch, "index_select", index_select)
    yield
    public.cache_clear()
    returned.cache_clear()


@pytest.mark.usefixtures("torch_of_another_library")
@pytest.mark.parametrize("examples", [(torch.tensor([0, 2]),), None])
def test_a_library_may_replace_functions_of_torch(examples: tuple[Tensor, ...] | None) -> None:
    model = Toy(lambda ids, w, v: torch.index_select(w, 0, ids) @ v, w=(3, 4), v=(4, 2))
    net = kfac_fx.compile(model, examples, loss="normal", strict=True)
    net.record((torch.tensor([0, 2]),), {})
    assert [registration.layer for registration in net.registrations] == ["embedding", "linear"]
