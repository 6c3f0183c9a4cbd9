"""Uses that do not see the batch, against the dense Fisher: where K-FAC is exact for them, and what it sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.recording.statistics import Moments
from tests.models import ZOO
from tests.tables import pairs

pytestmark = pytest.mark.usefixtures("float64")


class OneRow(nn.Module):
    """Two layers of one constant row each, whose result every case sees in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 5, bias=False)
        self.inner, self.head = nn.Linear(3, 5), nn.Linear(5, 3)
        self.register_buffer("row", torch.randn(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.inner(x) + self.second(torch.tanh(self.first(self.row)))))
        return y


FREE = [("first.weight", "first.bias"), ("second.weight",)]


def dense_fisher(model: nn.Module, x: Tensor, names: tuple[str, ...]) -> Tensor:
    """Σ_n J_nᵀ 2 I J_n / N of a normal with variance ½; weights flattened, the bias as their last column."""
    parameters = dict(model.named_parameters())
    total: Tensor | float = 0.0
    for case in x:
        for output in model(case.unsqueeze(0)).squeeze(0):
            grads = torch.autograd.grad(output, [parameters[name] for name in names], retain_graph=True)
            matrix = torch.cat([grads[0], *(bias.unsqueeze(-1) for bias in grads[1:])], dim=-1)
            total = total + 2 * torch.outer(matrix.flatten(), matrix.flatten()) / len(x)
    assert isinstance(total, Tensor)
    return total


@pairs(("exported", {"exported": True, "symbolic": False}), ("names", FREE))
def test_one_row_that_all_cases_share_is_exact(names: tuple[str, ...], exported: bool) -> None:
    """F = E[r rᵀ] ⊗ E[d dᵀ] if there is one r; the sources of the exact mode are single cases then."""
    torch.manual_seed(0)
    model, x = OneRow(), torch.randn(4, 3)
    net = kfac_fx.compile(model, (x,) if exported else None, loss="normal")
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
    estimator.update_covariances(x)
    torch.testing.assert_close(estimator.blocks[names].full_fisher_block(), dense_fisher(model, x, names))


@pytest.mark.parametrize("mode", ["gradients", "curvature_prop"])
def test_sums_over_cases_are_right_in_expectation(mode: str) -> None:
    """Gradients of two cases are independent and have no mean, so the square of their sum is the sum of their squares;
    held to five standard errors of the mean over rounds."""
    torch.manual_seed(0)
    model, x = OneRow(), torch.randn(4, 3)
    net = kfac_fx.compile(model, (x,), loss="normal")
    generator = torch.Generator().manual_seed(0)
    rounds = [net.record((x,), {}, mode=mode, generator=generator) for _ in range(150)]
    exact = net.record((x,), {}, mode="exact")
    for names in FREE:
        samples = torch.stack([round_times.statistics[names]["G"] for round_times in rounds])
        wanted = exact.statistics[names]["G"]
        error = samples.std(0).norm() / len(rounds) ** 0.5
        assert (samples.mean(0) - wanted).norm() < 5 * error
        assert error < 0.2 * wanted.norm()  # the bound means something


class Shared(nn.Module):
    """A projection of the batch and of a learned table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.key, self.head = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:  # [N, S, 4]
        y: Tensor = self.head((torch.tanh(self.key(x)) @ self.key(self.table.weight).t()).sum(-1, keepdim=True) * x)
        return y.mean(1)


def recorded(model: nn.Module, x: Tensor) -> Moments:
    return kfac_fx.compile(model, (x,), loss="normal").record((x,), {}, generator=torch.Generator().manual_seed(0))


def test_every_case_has_the_rows_that_all_share() -> None:
    """count and A: N S rows of the batch, and the table's three once a case."""
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(5, 7, 4)
    statistics = recorded(model, x).statistics["key.weight", "key.bias"]
    rows = torch.cat([x.flatten(0, 1), model.table.weight.detach().repeat(5, 1)])
    rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
    assert float(statistics["count"]) == 5 * 7 + 5 * 3
    torch.testing.assert_close(statistics["A"].squeeze(0), rows.mT @ rows)


def test_a_table_that_layers_are_applied_to_is_an_embedding_of_all_its_rows() -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(5, 7, 4)
    net = kfac_fx.compile(model, (x,), loss="normal")
    one = next(registration for registration in net.registrations if registration.parameters == ("table.weight",))
    assert (one.layer, one.approximation, len(one.uses)) == ("embedding", "kron_in_diag", 1)
    statistics = recorded(model, x).statistics["table.weight",]
    assert float(statistics["count"]) == 5 * 3
    torch.testing.assert_close(statistics["A_diag"], torch.full((1, 3), 5.0))


class Joined(nn.Module):
    """Two tables that are repeated, joined, repeated for every case, and read by a layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.place, self.channel = nn.Parameter(torch.randn(rows, 2)), nn.Parameter(torch.randn(rows, 3))
        self.inner, self.head = nn.Linear(5, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = len(self.place)
        both = self.place.unsqueeze(0).repeat(rows, 1, 1), self.channel.unsqueeze(1).repeat(1, rows, 1)
        table = torch.cat(both, -1).view(-1, 1, 5).repeat(x.shape[0], 1, 1)
        y = torch.tanh(self.inner(table)).view(x.shape[0], -1, 4).sum(1)
        return y * self.head(x)


@pytest.mark.parametrize("exported", [True, False])
def test_tables_that_are_joined_in_front_of_a_layer_are_embeddings(exported: bool) -> None:
    torch.manual_seed(0)
    model, x = Joined(2), torch.randn(4, 3)
    net = kfac_fx.compile(model, (x,) if exported else None, loss="normal")
    net.recorder((x,), {})
    layers = {registration.parameters: registration.layer for registration in net.registrations}
    assert layers["place",] == layers["channel",] == "embedding"
    model = Joined(1)  # of a single row, of which the product is exact
    estimator = kfac_fx.FisherEstimator(
        kfac_fx.compile(model, (x,), loss="normal", strict=True), damping=1e-3, estimation_mode="exact"
    )
    estimator.update_covariances(x)
    for name in ("place", "channel"):
        block = estimator.blocks[name,].full_fisher_block()
        torch.testing.assert_close(block, dense_fisher(model, x, (name,)))


class Chosen(OneRow):
    """A learned row that a layer reads as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.inner(x) + self.second(torch.tanh(self.first(self.rows[1])))))
        return y


def test_what_no_layer_has_without_sizes_is_captured_again_with_the_first_batch() -> None:
    blocks = []
    for examples in ((), (torch.randn(4, 3),)):
        net = kfac_fx.compile(Chosen(), examples or None, loss="normal")
        net.recorder((torch.randn(4, 3),), {})
        blocks.append({registration.parameters: registration.approximation for registration in net.registrations})
    assert blocks[0] == blocks[1] and blocks[0]["rows",] == "kron_in_diag"


def test_what_is_declared_generic_needs_no_other_capture() -> None:
    net = kfac_fx.compile(Chosen(), loss="normal", approximations={"rows": "generic"})
    first = net.captures.first
    assert net.recorder((torch.randn(4, 3),), {}).program.graph is first.program.graph


def test_the_report_says_that_gradients_are_summed() -> None:
    net = kfac_fx.compile(OneRow(), (torch.randn(4, 3),), loss="normal", approximations={"first": "kron_reduce"})
    first = next(registration for registration in net.registrations if registration.parameters == FREE[0])
    assert first.approximation == "kron"
    assert first.reason == (
        "free of the batch: one gradient for all cases, right in expectation over sampled targets; its gradient is "
        "summed over cases at its output, so not 'kron_reduce'"
    )
    assert "free of the batch" in str(net.report)


@pytest.mark.parametrize("asked", ["diagonal", "full"])
def test_blocks_of_cases_are_exact_where_gradients_are_summed(asked: str) -> None:
    model, x = OneRow().double(), torch.randn(4, 3).double()
    net = kfac_fx.compile(model, (x,), loss="normal", approximations={"first": asked})
    spectrum = kfac_fx.fit_spectrum(net, [x], mode="exact")
    for name in FREE[0]:
        p = model.get_parameter(name)
        each = [torch.autograd.grad(y, p, retain_graph=True)[0] for y in model(x).flatten()]
        torch.testing.assert_close(spectrum.diagonal(1)[name], 2 * torch.stack(each).square().sum(0) / len(x))
    assert [row.block for row in net.report.rows if row.names.startswith("first")] == [f"generic {asked}"] * 2


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_a_batch_of_another_size_feeds_the_same_blocks(batch: int) -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(5, 7, 4)
    net = kfac_fx.compile(model, (x,), loss="normal")
    net.record((x,), {})
    other = torch.randn(batch, 7, 4)
    moments = net.record((other,), {})
    assert float(moments.statistics["key.weight", "key.bias"]["count"]) == batch * (7 + 3)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
@pytest.mark.parametrize(
    "name",
    [
        "tokens",
        "rare",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("projection_of_a_table", "relative_queries")),
    ],
)
def test_compiled_recordings_are_the_same(name: str) -> None:
    """Without graph breaks, for tensors that a tap is given twice, too."""
    torch.manual_seed(0)
    model, x = ZOO[name].make(), ZOO[name].inputs()
    eager, whole = (
        kfac_fx.compile(model, x, loss=ZOO[name].loss, backend=backend) for backend in ("eager", "aot_eager")
    )
    records = [net.record(x, {}, generator=torch.Generator().manual_seed(0)).statistics for net in (eager, whole)]
    torch.testing.assert_close(*records)


@pytest.mark.parametrize("name", ["tokens", "relative_positions_in_fused_attention", "other_sizes"])
def test_tokens_and_tables_are_exact_in_the_exact_mode(name: str) -> None:
    """The sources are the same coordinate of all cases at once, and go back together."""
    torch.manual_seed(0)
    model, (x,) = ZOO[name].make(), ZOO[name].inputs()
    net = kfac_fx.compile(model, (x,), loss="normal")
    estimator = kfac_fx.FisherEstimator(net, damping=1e-3, estimation_mode="exact")
    estimator.update_covariances(x)
    assert net.recorder((x,), {}).loop_reason is None
    for key, block in estimator.blocks.items():
        if block.registration.layer == "scale_and_shift":
            torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, key))


class Padded(nn.Module):
    """Positions sliced to the length of the batch, in sequences with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.head = nn.Parameter(torch.randn(1, 9, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # [N, S, 4], [N, S]
        y: Tensor = self.head(x + self.position[:, : x.shape[1]]) * mask.unsqueeze(-1)
        return y.sum(1)


@pytest.mark.filterwarnings("error:padding_mask does not fit")
def test_a_padding_mask_leaves_gathered_elements_alone() -> None:
    """A gathered gradient goes back to its elements, where no row is a position, so it needs no mask; the layers around
    it are masked."""
    x, mask = torch.randn(3, 5, 4), torch.ones(3, 5)
    mask[1, 2:] = 0
    net = kfac_fx.compile(Padded(), (x, mask), loss="normal", padding_mask="mask")
    moments = net.record((x, mask), {})
    assert float(moments.statistics["head.weight", "head.bias"]["count"]) == mask.sum()
    assert [note.subject.split(" at ")[0] for note in net.program.unmasked] == ["scale_and_shift(position)"]


@pytest.mark.parametrize("name", ["tokens", "relative_positions_in_fused_attention"])
def test_one_case_at_first_finds_the_blocks_of_many(name: str) -> None:
    torch.manual_seed(0)
    (x,) = ZOO[name].inputs()
    net = kfac_fx.compile(ZOO[name].make(), (x[:1],), loss=ZOO[name].loss)
    first = net.record((x[:1],), {})
    assert net.record((x,), {}).statistics.keys() == first.statistics.keys()
