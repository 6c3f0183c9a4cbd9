"""Lightning, automatic and manual, equal to the plain loop bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import kfac_fx
from tests.trainers.common import WARNINGS, assert_equal, copies, state_of
from tests.trainers.small import cases, classifier, plain_loop

lightning = pytest.importorskip("lightning")
pytestmark = WARNINGS


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Validation runs between the epochs, and before the first."""

    def __init__(self, automatic: bool = True, **options: Any) -> None:
        super().__init__()
        self.model, self.options, self.automatic_optimization = classifier(), options, automatic

    def training_step(self, batch: list[Tensor], number: int) -> Tensor | None:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        assert not self.model.training
        self.log("validation", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> kfac_fx.KFAC:
        net = kfac_fx.compile(self.model, loss="categorical", in_place=True)
        return kfac_fx.KFAC(net, lr=0.3, damping=0.1, seed=0, **self.options)


def fitted(module: Module, path: str | None = None, epochs: int = 2, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=epochs, **quiet | options)
    trainer.fit(module, cases(), cases(), ckpt_path=path)
    return trainer


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_automatic_optimization_is_the_plain_loop(micro_batches: int, precision: Any, clip: float | None) -> None:
    module = Module()
    trainer = fitted(module, accumulate_grad_batches=micro_batches, precision=precision, gradient_clip_val=clip)
    expected, state = plain_loop(micro_batches, torch.bfloat16 if precision != "32" else None, clip)
    assert_equal(copies(module), expected)
    assert_equal(state_of(trainer.optimizers[0]), state)


def test_manual_optimization_is_the_plain_loop() -> None:
    module = Module(automatic=False)
    trainer = fitted(module)
    expected, state = plain_loop()
    assert_equal(copies(module), expected)
    assert_equal(state_of(trainer.optimizers[0]), state)


def test_automatic_optimization_adapts_the_damping() -> None:
    module = Module(adapt_damping=True, damping_adaptation_interval=2)
    optimizer = fitted(module).optimizers[0]
    assert optimizer.counter == 12 and optimizer.rho.isfinite() and optimizer.damping != 0.1


def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    first = Module()
    trainer = fitted(first, epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    second = Module()
    trainer = fitted(second, str(tmp_path / "one.ckpt"))
    expected, state = plain_loop()
    assert_equal(copies(second), expected)
    assert_equal(state_of(trainer.optimizers[0]), state)


# --- configure_optimizers runs again ----------------------------------------------------------------------------------


class Again(Module):
    """As docs/trainers.md has it, with the compiled module as an attribute. `lr` and `batch_size` are the tuner's."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.3, 8

    def configure_optimizers(self) -> kfac_fx.KFAC:
        kfac_fx.detach(self.model)
        self.net = kfac_fx.compile(self.model, loss="categorical", in_place=True)
        return kfac_fx.KFAC(self.net, lr=self.lr, damping=0.1, seed=0)

    def train_dataloader(self) -> Any:
        data = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*cases(), strict=True)))
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def trainer_of(folder: Path, epochs: int = 1, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": False, "default_root_dir": str(folder)}
    return lightning.Trainer(max_epochs=epochs, **quiet | options)


def test_a_module_is_fitted_twice_and_behind_the_tuner(tmp_path: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    module = Again()
    for _ in range(2):
        trainer = trainer_of(tmp_path)
        trainer.fit(module)
        assert trainer.optimizers[0].counter == 6  # a new optimizer, which records
    trainer = trainer_of(tmp_path)
    tuner = Tuner(trainer)
    tuner.lr_find(module, num_training=20, min_lr=0.01, max_lr=0.5, update_attr=True)
    trainer.fit(module)
    tuner.scale_batch_size(module, max_trials=2, init_val=4)
    trainer.fit(module)
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


def test_an_attribute_of_the_module_is_not_in_its_checkpoint(tmp_path: Path) -> None:
    first = Again()
    trainer = trainer_of(tmp_path)
    trainer.fit(first)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert not any(name.startswith("net.") for name in torch.load(tmp_path / "one.ckpt")["state_dict"])
    second, straight = Again(), Again()
    trainer_of(tmp_path, 2).fit(second, ckpt_path=str(tmp_path / "one.ckpt"))
    trainer_of(tmp_path, 2).fit(straight)
    assert_equal(copies(second), copies(straight))


class Whole(Module):
    """The LightningModule is compiled, and Lightning does not call it."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x)
        return result

    def configure_optimizers(self) -> kfac_fx.KFAC:
        return kfac_fx.KFAC(kfac_fx.compile(self, loss="categorical", in_place=True), lr=0.3, damping=0.1)


def test_a_lightning_module_that_is_compiled_is_told_to_compile_its_model() -> None:
    with pytest.raises(kfac_fx.FactorNotReady, match=r"^there .* Whole is compiled in place.*compile\(self.model, ..."):
        fitted(Whole())
