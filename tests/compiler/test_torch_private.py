"""Every private name of torch that the library uses exists, and does what the library relies on.

These tests use nothing else of the library, so that they run with any version of torch: `make guards TORCH=2.11.0`.
"""

from __future__ import annotations

import ast
import copy
import inspect
import logging
import sys
import threading
from pathlib import Path
from types import ClassMethodDescriptorType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.export import Dim
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from kfac_fx.passes import torch_private as private

ROOT = Path(__file__).parents[2]
LOADS = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # what torch itself loads late


class Called(TorchFunctionMode):
    """The names of the functions of torch that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def exported(forward: Any, *tensors: Tensor) -> fx.GraphModule:
    """The graph of a function, as torch.export captures it with a free first dimension."""

    class Model(nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return forward(*tensors)

    shapes = {"tensors": tuple({0: Dim.AUTO} for _ in tensors)}
    return torch.export.export(Model(), tensors, dynamic_shapes=shapes, strict=False).module()  # type: ignore[return-value]


def targets(graph: fx.Graph) -> set[str]:
    return {getattr(node.target, "__name__", str(node.target)).split(".")[0] for node in graph.nodes}


# --- modules ----------------------------------------------------------------------------------------------------------


def test_hooks_are_in_dictionaries_of_these_names() -> None:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda module, args: None)
    module.register_forward_hook(lambda module, args, output: None)
    module.register_full_backward_pre_hook(lambda module, grad: None)
    module.register_full_backward_hook(lambda module, grad, output: None)
    assert all(len(module.__dict__[name]) == 1 for name in (*private.FORWARD_HOOKS, *private.BACKWARD_HOOKS))


def test_the_hooks_of_a_tensor_are_known() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert not private.has_hooks(parameter)
    hook = parameter.register_hook(lambda gradient: gradient)
    assert private.has_hooks(parameter)
    hook.remove()
    assert not private.has_hooks(parameter)


def test_recurrent_layers_keep_their_weights_in_these_attributes() -> None:
    rnn = nn.LSTM(2, 3)
    assert rnn.__dict__.keys() >= private.FLAT_WEIGHTS
    assert rnn.__dict__["_flat_weights"][0] is rnn.weight_ih_l0


def test_transformers_ask_a_function_of_this_name_whether_a_mask_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.Size, object]] = []

    def is_causal(mask: torch.Tensor, is_causal: bool | None = None, size: int | None = None) -> bool:
        asked.append((mask.shape, is_causal))
        return False

    monkeypatch.setattr(nn.modules.transformer, private.IS_CAUSAL, is_causal)
    mask, x = nn.Transformer.generate_square_subsequent_mask(3), torch.randn(3, 2, 4)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4), 1, enable_nested_tensor=False)
    encoder(x, mask=mask)
    nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 1, 4), 1)(x, x, tgt_mask=mask)
    assert asked == [(mask.shape, None)] * 2


@pytest.mark.parametrize("dims", ["1d", "2d", "3d"])
def test_norms_have_one_base_class(dims: str) -> None:
    batch, instance = (getattr(nn, f"{kind}Norm{dims}") for kind in ("Batch", "Instance"))
    assert issubclass(batch, private.BatchNorm) and not issubclass(batch, private.InstanceNorm)
    assert issubclass(instance, private.InstanceNorm) and not issubclass(instance, private.BatchNorm)
    assert issubclass(batch, private.NormBase) and issubclass(instance, private.NormBase)


def test_a_modules_own_dictionaries_are_what_it_is_made_of() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm, mean = module[0], torch.ones(2)
    private.buffers_of(norm)["running_mean"] = mean
    assert norm.running_mean is mean
    assert list(private.parameters_of(norm)) == ["weight", "bias"]
    assert private.submodules_of(module)["0"] is norm


def test_shared_state_goes_on_being_shared() -> None:
    module, other = nn.Module(), nn.Linear(2, 3)
    private.share_state(module, other)
    other.added = nn.Parameter(torch.ones(1))
    assert dict(module.named_parameters()).keys() == {"weight", "bias", "added"}


def test_a_copy_has_submodules_apart_from_those_of_the_original() -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    private.hold_apart(other, {**private.submodules_of(module), "1": nn.ReLU()})
    x = torch.tensor([[-1.0, 2.0]])
    assert torch.equal(other(x), module.get_submodule("0")(x).relu())
    assert torch.equal(module(x), module.get_submodule("0")(x).tanh())
    assert other.get_parameter("0.weight") is module.get_parameter("0.weight")


def test_a_call_is_replaced_as_torch_compile_replaces_it_and_copies_have_their_own() -> None:
    module, x = nn.Linear(2, 3), torch.ones(1, 2)
    private.replace_call(module, lambda x: private.own_call(module)(x) + 1)
    assert torch.equal(module(x), module.forward(x) + 1)
    assert torch.equal(copy.deepcopy(module)(x), module.forward(x))
    assert private.CALL in module.__dict__ and private.replaced_call(module) is module.__dict__[private.CALL]
    private.replace_call(module, None)
    private.replace_call(module, None)
    assert private.replaced_call(module) is None and torch.equal(module(x), module.forward(x))
    module.compile(backend="eager")
    assert private.replaced_call(module) is not None


@LOADS
def test_fully_shard_sets_attributes_of_these_names_and_a_subclass() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    plain, module = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        fsdp.fully_shard(module, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    finally:
        torch.distributed.destroy_process_group()
    for sharded, other in ((module, plain), (module[0], plain[0])):
        new = sharded.__dict__.keys() - other.__dict__.keys()
        assert new and all(name.startswith(private.SHARDING) for name in new)
        assert private.class_of(sharded) is type(other) is private.class_of(other)
    assert type(module) is not nn.Sequential


def answers_in_joins() -> list[object]:
    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            answers.append(private.join_around_forward())
            return super().forward(x)

    answers: list[object] = []
    wrapped = nn.parallel.DistributedDataParallel(Asking(2, 2))
    wrapped(torch.ones(1, 2))
    for _ in range(2):
        with wrapped.join():
            wrapped(torch.ones(1, 2)).sum().backward()
    wrapped(torch.ones(1, 2))
    wrapped.module(torch.ones(1, 2))
    return answers


def test_a_forward_knows_the_join_that_its_wrapper_is_or_was_in() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # The wrapper is gone before the group. A join does not await its last message. A wrapper that is the last to
        # hold the group waits for this message with the lock of Python, and the thread of the message needs the lock.
        before, first, second, behind, alone = answers_in_joins()
    finally:
        dist.destroy_process_group()
    assert before is None and alone is None
    assert first is not None and behind is second is not first


@LOADS
def test_the_module_inside_a_compiled_one() -> None:
    module = nn.Linear(2, 3)
    assert private.compiled_from(torch.compile(module)) is module
    assert private.compiled_from(module) is None


# --- tracing ----------------------------------------------------------------------------------------------------------


def test_export_flattens_as_the_pytree_does() -> None:
    tree = {"b": (torch.ones(2), None), "a": [1, {"c": "text"}]}
    leaves, spec = private.pytree.tree_flatten(tree)
    assert private.pytree.tree_unflatten(leaves, spec) == tree
    assert [id(leaf) for leaf in private.pytree.tree_leaves(tree)] == [id(leaf) for leaf in leaves]
    program = torch.export.export(nn.Identity(), (tree,), strict=False)
    assert isinstance(spec, private.pytree.TreeSpec) and program.call_spec.out_spec == spec


def test_an_exported_module_checks_sizes_with_its_guards() -> None:
    module = exported(lambda x: x.view(2, -1), torch.ones(4, 3))
    guards = getattr(module, private.GUARDS)
    guards(torch.ones(6, 3))
    with pytest.raises(AssertionError):
        guards(torch.ones(6, 4))
    assert private.GUARDS in targets(module.graph)


def test_a_trace_below_autograd_has_the_operations_of_a_derivative() -> None:
    def derivative(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.sin().sum(), x)[0]

    traced = private.make_fx(derivative, tracing_mode="fake", record_stack_traces=True)(torch.ones(2))
    assert "cos" in targets(traced.graph)
    assert all("val" in node.meta for node in traced.graph.nodes if node.op != "output")


def test_what_is_done_to_a_proxy_is_appended_to_a_graph() -> None:
    graph = fx.Graph()
    x = fx.Proxy(graph.placeholder("x"), private.GraphAppendingTracer(graph))
    torch.relu(x + 1)
    assert targets(graph) == {"x", "add", "relu"}


@pytest.mark.parametrize("name", private.LOGGERS)
def test_the_loggers_are_those_of_modules_that_log(name: str) -> None:
    module: Any = __import__(name, fromlist=["log"])
    assert module.log is logging.getLogger(name)


def test_a_tensor_is_marked_as_one_that_stays_in_its_place() -> None:
    tensor = torch.zeros(2)
    private.mark_static(tensor)
    assert tensor._dynamo_static_input_type == "unguarded"  # type: ignore[attr-defined]


def test_errors_of_the_compiler_are_in_its_module() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def breaks(x: Tensor) -> Tensor:
        torch.compiler.disable(print)(x)
        return x

    with pytest.raises(Exception) as error:
        breaks(torch.ones(1))
    assert type(error.value).__module__.startswith(private.COMPILER)


def test_the_error_of_too_many_variants_has_this_name() -> None:
    def function(x: Tensor, mode: str) -> Tensor:
        return x + len(mode)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with pytest.raises(Exception) as error:
        for number in range(1 + torch._dynamo.config.recompile_limit):
            compiled(torch.ones(1), "a" * number)
    assert type(error.value).__name__ == private.RECOMPILE_LIMIT


def test_graphs_check_with_operations_of_these_names() -> None:
    class WithDefault(nn.Module):
        def forward(self, x: Any, flag: bool = True, other: Any = None) -> Any:
            return x + 1

    traced = fx.Tracer().trace(WithDefault(), concrete_args={"flag": True, "other": None})
    assert {private.ASSERT, private.ASSERT_IS_NONE} <= targets(traced)
    cast = exported(lambda x: x.to(torch.float64), torch.ones(2, 3))
    assert private.ASSERT_METADATA in targets(cast.graph)


def test_softmax_has_an_argument_for_the_depth_of_its_caller() -> None:
    default = inspect.signature(F.softmax).parameters[private.STACK_LEVEL].default
    assert default == 3
    assert torch.equal(F.softmax(torch.ones(2), 0, default), torch.softmax(torch.ones(2), 0))


def test_a_condition_on_sizes_is_asserted_without_a_branch() -> None:
    private.assert_size(True)
    with pytest.raises(RuntimeError):
        private.assert_size(False)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        private.assert_size(x.shape[0] == y.shape[0])
        return x + y

    exported(forward, torch.ones(2, 3), torch.ones(2, 3))


def test_a_symbolic_size_knows_that_of_the_example() -> None:
    module = exported(lambda x: x * 2, torch.ones(4, 3))
    node = next(node for node in module.graph.nodes if node.op == "placeholder")
    size = node.meta["val"].shape[0]
    assert isinstance(size, torch.SymInt) and private.size_hint(size) == 4
    assert not str(size).isdigit()


# --- operations -------------------------------------------------------------------------------------------------------


def test_operations_are_packets_of_overloads_with_schemas() -> None:
    packet, overload = torch.ops.aten.add, torch.ops.aten.add_.Tensor
    assert isinstance(packet, private.OpOverloadPacket) and isinstance(overload, private.OpOverload)
    assert "Tensor" in packet.overloads() and torch.Tag.nondeterministic_seeded in torch.ops.aten.dropout.default.tags
    schema = private.schema(overload)
    assert schema.name == "aten::add_" and [argument.name for argument in schema.arguments] == [
        "self",
        "other",
        "alpha",
    ]
    assert schema.arguments[0].alias_info.is_write and schema.returns[0].alias_info is not None
    alpha = schema.arguments[2]
    assert alpha.kwarg_only and alpha.has_default_value() and alpha.default_value == 1
    sizes = private.schema(torch.ops.aten.permute.default).arguments[1]
    assert str(sizes.type) == "List[int]" and sizes.N is None


def test_regions_are_operations_of_these_names() -> None:
    def without_gradient(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.sin() + 1

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.mT

    x = torch.ones(2, 3, requires_grad=True)
    assert private.NO_GRAD_REGION in targets(exported(without_gradient, x).graph)
    assert private.AUTOCAST_REGION in targets(exported(autocast, x).graph)
    assert all(name.startswith(private.REGION) for name in (private.NO_GRAD_REGION, private.AUTOCAST_REGION))
    assert getattr(torch.ops.higher_order, private.CHECKPOINT_REGION).name() == private.CHECKPOINT_REGION


def test_distributions_ask_whether_all_is_true() -> None:
    with Called() as called:
        torch.distributions.Normal(torch.zeros(2), torch.ones(2), validate_args=True).log_prob(torch.zeros(2))
    assert called.names.count(private.IS_ALL_TRUE) == 3


def test_weight_norm_calls_one_operation() -> None:
    with Called() as called:
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))(torch.ones(1, 2))
    assert private.WEIGHT_NORM in called.names


def test_operations_of_aten_have_these_names() -> None:
    x, statistics = torch.ones(4, 3), (torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3))
    graph = private.make_fx(lambda x: x.to(torch.float64).view(-1), tracing_mode="fake")(x).graph
    assert private.TO_COPY in targets(graph)
    assert torch.equal(getattr(torch.ops.aten, private.UNSAFE_VIEW)(x, [12]), x.view(12))
    wanted = F.batch_norm(x, statistics[2], statistics[3], *statistics[:2], eps=1e-5)
    weight, bias, mean, var = statistics
    aten = torch.ops.aten
    assert torch.equal(getattr(aten, private.BATCH_NORM)(x, *statistics, False, 0.1, 1e-5)[0], wanted)
    assert torch.equal(
        getattr(aten, private.BATCH_NORM_IN_EVALUATION)(x, weight, bias, mean, var, 0.1, 1e-5)[0], wanted
    )
    assert len(getattr(aten, private.BATCH_NORM_FUNCTIONAL)(x, *statistics, True, 0.1, 1e-5)) == 5


def test_products_of_groups_are_an_operation_of_this_name() -> None:
    schema = private.schema(getattr(torch.ops.aten, private.GROUPED_MM).default)
    assert [argument.name for argument in schema.arguments] == ["self", "mat2", "offs", "bias", "out_dtype"]


def test_packed_sequences_are_made_and_undone_by_these_functions() -> None:
    with Called() as called:
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2]))
        nn.utils.rnn.pad_packed_sequence(packed)
    assert {private.PACK, private.UNPACK} <= set(called.names)


@LOADS
def test_transformed_tensors_are_made_by_these_functions() -> None:
    graph = exported(lambda x: torch.func.vmap(torch.sin)(x), torch.ones(2, 3)).graph
    assert private.ADD_BATCH_DIM in targets(graph)
    try:
        dual = exported(lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1], torch.ones(2, 3)).graph
    except AssertionError:  # torch.export knows no forward mode; a capture goes on below autograd
        assert torch.__version__ < "2.12"
    else:
        assert private.FORWARD_MODE & targets(dual)


def test_lists_of_tensors_are_added_and_copied_in_place() -> None:
    tensors = [torch.zeros(2), torch.zeros(3)]
    private.foreach_add_(tensors, [torch.ones(2), torch.ones(3)])
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    private.foreach_copy_(tensors, [torch.full((2,), 2.0), torch.full((6,), 2.0, dtype=torch.float64)[::2]])
    assert all(bool((tensor == 2).all()) for tensor in tensors)


# --- autograd ---------------------------------------------------------------------------------------------------------


def test_a_reentrant_checkpoint_applies_a_function_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = []
    monkeypatch.setattr(private.CheckpointFunction, "apply", lambda *arguments: applied.append(arguments))
    checkpoint.checkpoint(torch.sin, torch.ones(1), use_reentrant=True)
    ((function, preserves, x),) = applied
    assert function is torch.sin and preserves is True and torch.equal(x, torch.ones(1))


def test_a_checkpoint_that_is_not_reentrant_runs_a_generator_around(monkeypatch: pytest.MonkeyPatch) -> None:
    around: list[Any] = []

    def generator(*arguments: Any, **options: Any) -> Any:
        around.append("before")
        yield
        around.append("after")

    for name in private.CHECKPOINT_GENERATORS:
        monkeypatch.setattr(checkpoint, name, generator)
    checkpoint.checkpoint(lambda x: around.append("function"), torch.ones(1), use_reentrant=False)
    assert around == ["before", "function", "after"]


def test_torchs_own_functions_are_told_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    apply = private.function_apply()

    def note(cls: Any, *args: Any) -> Any:
        seen.append(cls.__name__)
        return apply.__get__(None, cls)(*args)

    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(note))

    @torch.library.custom_op("guards::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    twice.register_autograd(lambda ctx, grad: 2 * grad)
    twice(torch.ones(1, requires_grad=True))
    module = nn.Linear(1, 1)
    module.register_full_backward_hook(lambda module, grad, output: None)
    module(torch.ones(1, requires_grad=True))
    assert seen and all(name.startswith(private.OWN_FUNCTIONS) for name in seen)
    assert {name for prefix in private.OWN_FUNCTIONS for name in seen if name.startswith(prefix)} == set(seen)


def test_the_apply_of_functions_can_be_bound_to_a_class() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

    assert isinstance(private.function_apply(), (classmethod, ClassMethodDescriptorType))
    assert float(private.function_apply().__get__(None, Twice)(torch.ones(()))) == 2


def test_memories_are_equal_if_they_are_the_same_without_data_too() -> None:
    x = torch.ones(2, 2, device="meta")
    ref, view, other = (private.StorageWeakRef(t.untyped_storage()) for t in (x, x[0], torch.empty_like(x)))
    assert ref == view and ref != other and len({ref, view, other}) == 2


def test_the_version_of_a_tensor_counts_what_is_written_into_it_and_its_views() -> None:
    tensor = torch.zeros(2)
    before = private.version(tensor)
    tensor[0].fill_(1.0)
    assert private.version(tensor) == before + 1
    with torch.inference_mode():
        assert private.version(torch.zeros(2)) == 0


def test_a_tensor_that_is_written_into_keeps_its_version() -> None:
    x, saved = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    loss = (x * saved).sum()
    with private.versions_kept((saved,)):
        saved.zero_()
        saved.fill_(3.0)
    assert torch.equal(torch.autograd.grad(loss, x)[0], saved)


def test_a_wrapped_tensor_is_unwrapped_to_its_memory() -> None:
    x = torch.ones(2)

    def function(wrapped: Tensor) -> Tensor:
        assert private.debug_unwrap(wrapped).data_ptr() == x.data_ptr()
        return wrapped.sum()

    torch.func.grad(function)(x)
    assert private.debug_unwrap(x) is x


@LOADS
@pytest.mark.parametrize("kind", ["grad", "vjp", "jvp", "jacfwd", "dual", "none"])
def test_derivatives_run_code_that_is_known(kind: str) -> None:
    seen: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and private.differentiates(frame.f_code):
            seen.add("any")
        if event == "call" and private.differentiates_forward(frame.f_code):
            seen.add("forward")

    def dual() -> None:
        with torch.autograd.forward_ad.dual_level():
            pass

    x = torch.ones(2, requires_grad=True)
    run = {
        "grad": lambda: torch.autograd.grad(x.sum(), x),
        "vjp": lambda: torch.func.vjp(torch.sin, x.detach()),
        "jvp": lambda: torch.func.jvp(torch.sin, (x.detach(),), (x.detach(),)),
        "jacfwd": lambda: torch.func.jacfwd(torch.sin)(x.detach()),
        "dual": dual,
        "none": lambda: private.debug_unwrap(x).sum(),
    }
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        run[kind]()
    finally:
        sys.setprofile(before)
    of_kind = {"none": set(), "grad": {"any"}, "vjp": {"any"}, "dual": {"forward"}}
    assert seen == of_kind.get(kind, {"any", "forward"})


def test_a_dispatch_mode_sees_operations() -> None:
    class Seen(private.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(func)
            return func(*args, **(kwargs or {}))

    operations: list[Any] = []
    with Seen():
        torch.ones(2).nonzero()
    assert torch.Tag.dynamic_output_shape in operations[-1].tags


def test_transformations_are_counted() -> None:
    outside, seen = private.transforms(), []

    def function(x: Tensor) -> Tensor:
        seen.append(private.transforms() - outside)
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(torch.func.grad(function))(torch.ones(2, 2))
    with forward_ad.dual_level():
        function(torch.ones(2))
    assert seen == [1, 2, 1] and private.transforms() == outside


def test_functional_calls_are_told() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self) -> bool:
            return private.in_functional_call()

    model = Asking()
    assert not model() and torch.func.functional_call(model, {"weight": torch.zeros(())}, ())
    with pytest.warns(FutureWarning):
        assert torch.nn.utils.stateless.functional_call(model, {"weight": torch.zeros(())}, ())
    assert not model()


def test_tensors_with_a_dimension_of_vmap_are_told() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(private.is_batched(torch.ones(2), x))
        return x.sum()

    torch.func.vmap(function)(torch.ones(2, 2))
    torch.func.grad(function)(torch.ones(2))
    assert seen == [True, False] and not private.is_batched(torch.ones(2))


def test_hooks_find_the_losses_of_the_backward_that_runs() -> None:
    found: list[list[int]] = []

    def note(gradient: Tensor) -> None:
        found.append([id(root) for root in private.backward_roots(thread)])

    thread = threading.get_ident()
    for several in (False, True):
        leaf = torch.ones(2, requires_grad=True)
        leaf.register_hook(note)
        loss, other = leaf.sum(), leaf.prod()
        if several:
            torch.autograd.backward([loss, other])
        else:
            loss.backward()
        assert found.pop() == [id(loss), id(other)][: 1 + several]
    loss = (leaf * 2).sum()
    worker = threading.Thread(target=loss.backward)  # in which no hook is told where to look
    worker.start()
    worker.join()
    assert found.pop() == [] and private.backward_roots(thread) == ()


def test_hooks_find_whether_the_backward_is_that_of_grad() -> None:
    found: list[bool] = []
    leaf, thread = torch.ones(2, requires_grad=True), threading.get_ident()
    leaf.register_hook(lambda _: found.append(private.grad_runs(thread)))
    leaf.sum().backward()
    torch.autograd.backward(leaf.prod())
    torch.autograd.grad(leaf.prod(), leaf, create_graph=True)
    assert found == [False, False, True] and not private.grad_runs(thread)


def test_a_recurrent_layer_asks_for_the_size_of_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = getattr(nn.RNNBase, private.EXPECTED_HIDDEN_SIZE)

    def expected(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> tuple[int, int, int]:
        asked.append(batch_sizes)
        size: tuple[int, int, int] = original(self, input, batch_sizes)
        return size

    monkeypatch.setattr(nn.RNNBase, private.EXPECTED_HIDDEN_SIZE, expected)
    nn.GRU(2, 3)(torch.ones(4, 1, 2), torch.zeros(1, 1, 3))
    assert asked == [None]


# --- the rest of the library ------------------------------------------------------------------------------------------


def test_no_other_module_reads_a_private_attribute_of_torch() -> None:
    sources = {*(ROOT / "passes").rglob("*.py"), *(ROOT / "kfac_fx").rglob("*.py")}
    trees = {path: ast.parse(path.read_text()) for path in sources if path.name != "torch_private.py"}
    nodes = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    ours = {
        node.attr if isinstance(node, ast.Attribute) else node.name
        for node_list in nodes.values()
        for node in node_list
        if (isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"))
        or isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    strange = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path, node_list in nodes.items()
        for node in node_list
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls")
        and node.attr not in ours - {"_parameters", "_buffers", "_modules"}
    ]
    assert strange == []


def jagged() -> Tensor:
    documents = [torch.randn(length, 2) for length in (3, 1)]
    return torch.nested.nested_tensor(documents, layout=torch.jagged)


def test_nested_tensors_have_values_offsets_a_dimension_and_a_length() -> None:
    x = jagged()
    assert type(x) is private.NESTED.kind
    assert torch.equal(private.NESTED.values(x), x.values())
    assert private.NESTED.offsets(x).tolist() == [0, 3, 4] and private.NESTED.longest(x) == 3
    assert (private.NESTED.dimension(x), private.NESTED.dimension(x.unsqueeze(1))) == (1, 2)
    without = torch.nested.nested_tensor_from_jagged(x.values(), x.offsets())
    assert private.NESTED.longest(without) is None and without.to_padded_tensor(0.0).shape == (2, 4, 2)
    again = private.NESTED.kind(
        x.values(), x.offsets(), _ragged_idx=1, _metadata_cache={"max_seqlen": torch.empty(3, 0)}
    )
    assert private.NESTED.longest(again) == 3


def test_nested_tensors_are_made_and_attend_by_these_functions() -> None:
    assert vars(private.NESTED.kind).keys() >= {"__torch_function__", "__torch_dispatch__", "values"}
    names = ("get_tensor_symint", "nested_view_from_values_offsets", "nested_view_from_values_offsets_lengths")
    assert all(callable(getattr(private.NESTED.module, name)) for name in names)
    assert callable(private.NESTED.operations.jagged_scaled_dot_product_attention)
    assert private.NESTED.tracer.is_fx_tracing() is False


def test_a_size_of_lengths_is_equal_to_itself_and_has_products_with_symbolic_sizes() -> None:
    one, other = private.nested_int(-1), private.nested_int(-2)
    assert one == one and one != other and one * 2 == private.nested_int(-1) * 2
    products = []

    def forward(x: Tensor) -> Tensor:
        products.append(one * x.shape[0])  # type: ignore[arg-type]
        return x + 1

    exported(forward, torch.ones(3))
    assert products[0] == one * 3


def test_operations_are_dispatched_without_the_tracer() -> None:
    """Those of the first kind are not in the graph, and those in the state of the tracer are."""
    plain: list[bool] = []

    def forward(x: Tensor) -> Tensor:
        state = private.DispatchState.now()
        with torch.autocast("cpu", torch.bfloat16):
            inside = private.DispatchState.now()
            with inside.without_tracer():
                kept.append((x @ x).dtype)
                with inside.entered():
                    cast.append((x @ x).dtype)
        with state.without_tracer():
            x.sin()
            with state.entered():
                result = x.cos()
        plain.append(private.without_functional(x) is private.without_functional(x))
        return result

    kept, cast = list[torch.dtype](), list[torch.dtype]()
    names = targets(exported(forward, torch.ones(3)).graph)
    assert "cos" in names and "sin" not in names and plain == [True]
    assert (kept, cast) == ([torch.float32], [torch.bfloat16])


@pytest.mark.parametrize("kind", ["backward", "grad"])
def test_a_hook_knows_its_backward_and_is_called_behind_it(kind: str) -> None:
    numbers: list[int] = []
    gradients: list[Tensor | None] = []
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y, z = 2 * x, 3 * x
        for tensor in (y, z):
            tensor.register_hook(lambda _: numbers.append(private.backward_here()))
        y.register_hook(lambda _: private.after_backward(lambda: gradients.append(x.grad)))
        (y + z).sum().backward() if kind == "backward" else torch.autograd.grad((y + z).sum(), x)
    assert private.backward_here() == -1
    assert numbers[0] == numbers[1] >= 0 and numbers[2] == numbers[3] != numbers[0]
    assert len(gradients) == 2 and all((gradient is None) is (kind == "grad") for gradient in gradients)
