"""The values of `kfac_fx.Metrics` arrive in the loggers of trainers and in TensorBoard's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import kfac_fx
from tests.trainers.common import WARNINGS
from tests.trainers.small import cases, classifier

pytestmark = WARNINGS


def optimizer_of(model: torch.nn.Module, *example: Any) -> kfac_fx.KFAC:
    net = kfac_fx.compile(model, *example, loss=None if example else "categorical", in_place=True)
    return kfac_fx.KFAC(net, lr=0.3, damping=0.125, seed=0)


def test_hugging_faces_history_has_the_values(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(11, (16, 8), generator=torch.Generator().manual_seed(0))
    optimizer = optimizer_of(model, (), {"input_ids": tokens[:4], "labels": tokens[:4]})
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, max_grad_norm=0.0, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    )
    metrics = kfac_fx.Metrics(optimizer, lambda values, step: trainer.log(values), every=2)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "damping" in entry]
    assert len(logged) == 2 and metrics.step == 4
    for name, value in metrics.values.items():
        assert logged[-1][name] == pytest.approx(value, nan_ok=True), name


def test_lightnings_metrics_have_the_values() -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = classifier()

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> kfac_fx.KFAC:
            optimizer = optimizer_of(self.model)
            self.metrics = kfac_fx.Metrics(optimizer, lambda values, step: self.log_dict(values), every=2)
            return optimizer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, **quiet)
    module = Module()
    trainer.fit(module, cases())
    assert module.metrics.step >= 2
    for name, value in module.metrics.values.items():
        assert trainer.logged_metrics[name].item() == pytest.approx(value, nan_ok=True), name


def test_accelerate_writes_the_values_to_tensorboards_files(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("kfac")
    model = classifier()
    optimizer = optimizer_of(model)
    metrics = kfac_fx.Metrics(optimizer, accelerator.log, every=2)
    model, prepared, batches = accelerator.prepare(model, optimizer, cases())
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x), y))
        prepared.step()
        prepared.zero_grad()
    accelerator.end_training()
    assert_written(tmp_path / "kfac", metrics)


def test_tensorboards_files_have_the_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    model = classifier()
    optimizer = optimizer_of(model)
    with SummaryWriter(str(tmp_path)) as writer:  # type: ignore[no-untyped-call]
        metrics = kfac_fx.Metrics(optimizer, kfac_fx.Metrics.to_tensorboard(writer), every=2)
        for x, y in cases():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert_written(tmp_path, metrics)


def assert_written(folder: Path, metrics: kfac_fx.Metrics) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert metrics.step >= 2 and set(events.Tags()["scalars"]) == set(metrics.values)
    for name, value in metrics.values.items():
        last = events.Scalars(name)[-1]
        assert last.step == metrics.step and last.value == pytest.approx(value, rel=1e-6, nan_ok=True), name
