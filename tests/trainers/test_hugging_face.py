"""Hugging Face's Trainer, unmodified, with models that are compiled in place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from tests.trainers.common import WARNINGS, assert_equal, copies, state_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = WARNINGS

VOCABULARY, LENGTH = 23, 8


def tied_gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=VOCABULARY, num_labels=3, **sizes)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def rows() -> Tensor:
    return torch.randint(VOCABULARY, (32, LENGTH), generator=torch.Generator().manual_seed(0))


# A column that no forward takes: Trainer drops it by the signature of the model's forward.
TEXT = [{"input_ids": row, "labels": row, "comment": 1} for row in rows()]
CLASSES = [{"input_ids": row, "labels": row[0] % 3, "comment": 1} for row in rows()]
CASES = {"gpt2": (tied_gpt2, TEXT), "bert": (bert, CLASSES)}


def collated(data: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in data]) for name in ("input_ids", "labels")}


def optimizer_of(model: nn.Module, **options: Any) -> kfac_fx.KFAC:
    data = TEXT if isinstance(model, transformers.GPT2LMHeadModel) else CLASSES
    net = kfac_fx.compile(model, (), collated(data[:4]), in_place=True)
    return kfac_fx.KFAC(net, lr=0.5, damping=1e-2, norm_constraint=1e-2, seed=0, **options)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def arguments(folder: Path, **options: Any) -> Any:
    given = {"per_device_train_batch_size": 4, "max_steps": 6, "save_steps": 3, "logging_steps": 2, "report_to": []}
    given |= {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "steps",
    }
    return transformers.TrainingArguments(str(folder), **given | options)


@pytest.mark.parametrize("case", CASES)
def test_training_evaluates_saves_loads_and_resumes_bit_for_bit(case: str, tmp_path: Path) -> None:
    """With dropout, the default clipping of gradients, and a scheduler."""
    make, data = CASES[case]
    model = make()
    optimizer = optimizer_of(model)
    pair = (optimizer, halving(optimizer))
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=data, eval_dataset=data, optimizers=pair)
    trainer.train()
    assert optimizer.counter == 6 and optimizer.skipped == 0
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [3, 6]
    trainer.save_model(str(tmp_path / "saved"))
    loaded = type(model).from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        ids = rows()[:2]
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    if case == "gpt2":
        assert model.generate(ids[:, :3], max_new_tokens=2, do_sample=False).shape == (2, 5)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    again = make()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    resumed = optimizer_of(again)
    pair = (resumed, halving(resumed))
    trainer = transformers.Trainer(again, arguments(tmp_path), train_dataset=data, eval_dataset=data, optimizers=pair)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.counter == 6 and trainer.state.global_step == 6
    assert_equal(copies(model), copies(again))
    assert_equal(state_of(optimizer), state_of(resumed))


class Factory:
    """Trainer makes an instance without arguments, and calls it with the model on its device."""

    def __call__(self, model: nn.Module, **options: Any) -> kfac_fx.KFAC:
        return optimizer_of(model, **options)


def trained(model: nn.Module, folder: Path, data: Any, **options: Any) -> nn.Module:
    settings = arguments(folder, eval_strategy="no", save_strategy="no", **options)
    factory = (Factory, {"invert_every": 2})
    transformers.Trainer(model, settings, train_dataset=data, optimizer_cls_and_kwargs=factory).train()
    return model


def test_a_factory_makes_the_optimizer_and_the_trainer_its_scheduler(tmp_path: Path) -> None:
    model, other = bert().eval(), bert()
    before = copies(model)
    trained(model, tmp_path, CLASSES, lr_scheduler_type="constant")
    assert all(not torch.equal(a, b) for a, b in zip(before, copies(model), strict=True))
    optimizer = optimizer_of(other, invert_every=2)
    pair = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))
    settings = arguments(tmp_path, eval_strategy="no", save_strategy="no")
    transformers.Trainer(other, settings, train_dataset=CLASSES, optimizers=pair).train()
    assert_equal(copies(model), copies(other))


@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_accumulation_steps": 2}], ids=["bf16", "accumulation"])
def test_the_text_model_trains_with(options: dict[str, Any], tmp_path: Path) -> None:
    model = tied_gpt2()
    optimizer = optimizer_of(model)
    settings = arguments(tmp_path, save_strategy="no", **options)
    trainer = transformers.Trainer(
        model, settings, train_dataset=TEXT, eval_dataset=TEXT, optimizers=(optimizer, halving(optimizer))
    )
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert optimizer.counter == 6 and optimizer.skipped == 0 and not optimizer._forwards.unrecorded
    assert losses[1] < losses[0]


def test_a_trainer_of_a_model_that_was_not_compiled_in_place_is_told(tmp_path: Path) -> None:
    model = bert()
    net = kfac_fx.compile(model, (), collated(CLASSES[:4]))
    optimizer = kfac_fx.KFAC(net, lr=0.5, damping=1e-2)
    pair = (optimizer, halving(optimizer))
    trainer = transformers.Trainer(
        model, arguments(tmp_path, eval_strategy="no"), train_dataset=CLASSES, optimizers=pair
    )
    with pytest.raises(kfac_fx.FactorNotReady, match=r"write kfac_fx.compile\(model, ..., in_place=True\)"):
        trainer.train()


def test_a_trainer_of_the_compiled_module_is_told_at_the_first_step_that_it_cannot_be_saved(tmp_path: Path) -> None:
    model = tied_gpt2()
    net = kfac_fx.compile(model, (), collated(TEXT[:4]))
    optimizer = kfac_fx.KFAC(net, lr=0.5, damping=1e-2)
    settings = arguments(tmp_path, eval_strategy="no", max_steps=2, save_steps=2)
    trainer = transformers.Trainer(net, settings, train_dataset=TEXT, optimizers=(optimizer, halving(optimizer)))
    told = pytest.warns(UserWarning, match=r"kfac_fx.compile\(model, ..., in_place=True\), and Trainer\(model, ...\)")
    with told, pytest.raises(RuntimeError, match="Some tensors share memory"):
        trainer.train()
    assert optimizer.counter == 2


def test_copies_of_a_model_in_training_are_plain_models() -> None:
    model = tied_gpt2()
    optimizer = optimizer_of(model)
    other = copy.deepcopy(model)
    other(**collated(TEXT[:4]))
    assert not optimizer._forwards.seen.forwards
    model(**collated(TEXT[:4]))
    assert optimizer._forwards.seen.forwards == 1


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")
def test_a_tied_model_whose_layers_are_sharded_trains_as_whole() -> None:
    """transformers wraps the forward of every subclass of its layers, also of those that fully_shard makes."""
    from torch.distributed.fsdp import fully_shard

    weights, batch = [], collated(TEXT[:8])
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        for sharded in (False, True):
            model: Any = tied_gpt2().double()
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            net = kfac_fx.compile(model, (), collated(TEXT[:4]), in_place=True)
            for unit in (*model.transformer.h, model) if sharded else ():
                fully_shard(unit)
            optimizer = kfac_fx.KFAC(net, estimation_mode="exact", seed=0)
            for _ in range(2):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append([p.full_tensor() if sharded else p.detach() for p in model.parameters()])
    finally:
        torch.distributed.destroy_process_group()
    for whole, on_shards in zip(*weights, strict=True):
        torch.testing.assert_close(on_shards, whole, rtol=1e-9, atol=1e-9)
