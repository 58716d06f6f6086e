"""The base LightningModule: what happens in a step, and when metrics are read and logged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection

from leyden.data.datamodule import DataModule
from leyden.data.loaders import Batch, Batches, BatchLoader
from leyden.data.ranks import data_rank, data_size
from leyden.engine.calls import count_steps, plan_calls
from leyden.engine.direct import Calls
from leyden.engine.ema import WeightAverage, take_raw
from leyden.engine.epoch_state import MeanLoss, Seen, load_epoch, save_epoch
from leyden.engine.non_finite import ADVICE, FiniteGuard
from leyden.engine.optim import build_optimizer, take_up
from leyden.engine.out_of_memory import MicroBatches
from leyden.engine.parallel import shard, step_by_kind
from leyden.engine.precision import unscale_gradient
from leyden.engine.rehearsal import compile_first
from leyden.engine.rng import seed_step
from leyden.engine.schedule import Schedule
from leyden.engine.settings import PLAIN_STEP
from leyden.engine.step import Part, batch_length, clip_gradient
from leyden.engine.threads import ThreadChoice, choose_threads
from leyden.errors import TrainingError


class Task(LightningModule):
    """A learning task: a network, a loss and metrics.

    A subclass sets `input_key` and `metric_names`, and gives `compute_loss`, `build_metrics` and
    `baseline_outputs`. The base does the rest: steps, schedule, metrics over whole epochs, logging.

    In pseudocode, one epoch is::

        for batch in train:  loss = compute_loss(batch); backward; optimiser step; metrics.update
        for batch in val:    metrics.update
        write train/* and val/* once, at the global step reached

    Metrics are accumulated on the device over all samples and read once per epoch (the loss also once per
    `trainer.log_every_n_steps`), so a value never depends on the batch size.

    Args:
        net: the network; takes `batch[input_key]`.
        optim: called with the named parameters, gives the optimiser.
        schedule: factor of the learning rate over the steps.
        seed: of randomness inside the step.
    """

    input_key: ClassVar[str] = "input"
    metric_names: ClassVar[tuple[str, ...]] = ()
    # Whether `compute_loss` uses `batch["label_probability"]` where a batch has it.
    takes_mixed_labels: ClassVar[bool] = False

    def __init__(
        self, net: nn.Module, optim: Callable[..., torch.optim.Optimizer], schedule: Schedule, seed: int = 0
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.engine = PLAIN_STEP
        self.net = net
        self.optim = optim
        self.schedule = schedule
        self.seed = seed
        self.micro_batches = MicroBatches(self)
        self.losses = nn.ModuleDict({f"{phase}_loss": MeanLoss() for phase in ("train", "val", "test")})
        self.metrics = nn.ModuleDict()  # built in `setup`, when the subclass knows its classes or targets
        # The last values read, for the progress bar: reading them costs no device synchronisation.
        self.latest: dict[str, float] = {}
        # Whether a resumed run takes the settings of `optim` from the config, where they differ from the checkpoint's.
        self.new_optim_settings = False
        self._optim_settings: list[dict[str, Any]] = []
        # Where a resumed run stands in its epoch: batches done, and the trainer's progress in the checkpoint
        self.batches_done = 0
        self.loops_to_restore: dict[str, Any] = {}
        # Called before each optimiser step, when its gradient is known; cheaper than a callback's hook.
        self.step_listeners: list[Callable[[], None]] = []
        # Of the micro-batches of the step that is taken, on the device
        self.losses_of_step: list[Tensor] = []
        self.thread_choice: ThreadChoice | None = None
        # Whether each forward pass needs all processes, since each holds a part of the weights
        self.waits_for_all = False
        self._interval_loss = MeanLoss()
        self._calls: Calls
        self._num_steps = 1
        self._seen = Seen()
        self._grad_norm: Tensor | None = None
        self._guard: FiniteGuard | None = None
        self._guard_state: dict[str, Any] = {}
        self._average: WeightAverage | None = None

    # ---- what a subclass gives -----------------------------------------------------------------------------

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss over the batch, a scalar, and the outputs that metrics and predictions use."""
        raise NotImplementedError

    def build_metrics(self) -> MetricCollection:
        """Fresh torchmetrics, named as in `metric_names`; updated with `metric_inputs`."""
        raise NotImplementedError

    def metric_inputs(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the metrics take: predictions and targets."""
        raise NotImplementedError

    def baseline_outputs(self, data: DataModule, num_rows: int) -> tuple[str, Tensor]:
        """A trivial predictor's name and its outputs for `num_rows` rows, from the training targets only."""
        raise NotImplementedError

    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        """Outputs as named columns for people, one value per row."""
        raise NotImplementedError

    def summary(self, data: DataModule) -> dict[str, float]:
        """Further final values for metrics.json, e.g. coefficients of a linear model."""
        return {}

    def keep_tested(self, outputs: Tensor, batch: Batch) -> None:
        """Called with each part of the test, for what `draw` needs."""

    def draw(self) -> dict[str, Figure]:
        """Pictures of the test by name, e.g. a confusion matrix; called once, after the test."""
        return {}

    def setup(self, stage: str | None = None) -> None:
        if not self.metrics:
            self.metrics.update({f"{p}_metrics": self.build_metrics() for p in ("train", "val", "test")})
        if stage == "fit" and self.engine.ema_decay is not None and self._average is None:
            self._average = WeightAverage(self.net, self.engine.ema_decay, self.engine.ema_start_step)

    def configure_model(self) -> None:
        shard(self)

    # ---- steps ---------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Tensor:
        """The network's output for a batch."""
        output: Tensor = self.net(batch[self.input_key])
        return output.clone() if self.engine.uses_cuda_graphs and output.is_cuda else output

    def training_step(self, item: Batch | Batches, batch_idx: int) -> None:
        """Takes the optimiser steps of one item of the loader: as many as it has groups of batches to accumulate."""
        trainer, per_step = self.trainer, self.engine.accumulate_batches
        batches = [item] if isinstance(item, dict) else item
        step, max_steps = trainer.global_step, trainer.max_steps
        lengths = self._global_lengths(batches, batch_idx)
        for start in range(0, len(batches), per_step):
            if step == max_steps:
                break
            self._optimise(trainer, step, batches[start : start + per_step], lengths[start : start + per_step])
            step += 1
        if step == max_steps:
            trainer.should_stop = True  # so that the last state is validated, wherever in an epoch it is
        # Not in on_train_batch_end, which comes after the callbacks': what they save has to be complete.
        self._log_interval(batch_idx)

    def _global_lengths(self, batches: list[Batch] | Batches, item: int) -> list[int]:
        loader = self.trainer.train_dataloader
        if isinstance(loader, BatchLoader):
            return loader.global_lengths(item, batches)
        return [batch_length(batch) * data_size(self.trainer) for batch in batches]

    def _optimise(self, trainer: Trainer, step: int, batches: list[Batch], lengths: list[int]) -> None:
        """One optimiser step: the gradient of the mean loss over all samples of these batches, however cut."""
        optimizer = trainer.optimizers[0]
        rate = self.schedule.factor(step - self.guard.num_skipped, self._num_steps)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate
        self._calls.zero_grad()
        self.micro_batches.compute_gradient(batches, lengths, step)
        if self._seen.is_full:
            self._count_seen()
        for listener in self.step_listeners:
            listener()
        is_taken = self.guard.allows(step + 1, optimizer)
        self.micro_batches.step()
        if self.guard.has_stepped(is_taken) and self._average:
            self._average.update(step + 1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clips; here a float16 gradient has been divided by its scale."""
        if self.micro_batches.is_clipped:
            return  # and now the step is repeated
        unscale_gradient(self.trainer.precision_plugin, optimizer)
        if self.engine.clips:
            self._grad_norm = clip_gradient(
                self.net.parameters(), self.engine.gradient_clip_norm, self.engine.gradient_clip_value
            )
        self.micro_batches.is_clipped = True

    def _part_loss(self, part: Part, step: int) -> Tensor:
        seed_step(self.seed, step, part.position, self._rank, self._step_device)
        loss, outputs = self.micro_batches.compute_loss(part.batch)
        self.losses_of_step.append(loss.detach())
        if not self.guard.watch(part, loss, step + 1):
            return loss
        self._seen.add(loss.detach(), batch_length(part.batch), *self.metric_inputs(outputs.detach(), part.batch))
        return loss

    def _count_seen(self) -> None:
        """Adds the micro-batches seen since the last time to the metrics."""
        if (seen := self._seen.take()) is not None:
            losses, lengths, outputs, targets = seen
            self.losses_of("train").update(losses, lengths)
            self._interval_loss.update(losses, lengths)
            self.metrics_of("train").update(outputs, targets)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        return self.micro_batches.predict(batch)

    def _evaluate(self, phase: str, batch: Batch) -> None:
        for part, (loss, outputs) in self.micro_batches.evaluate(batch, self.compute_loss):
            self._update(phase, loss, outputs, part)
            if phase == "test":
                self.keep_tested(outputs.detach(), part)

    def _update(self, phase: str, loss: Tensor, outputs: Tensor, batch: Batch) -> None:
        self.losses_of(phase).update(loss.detach(), weight=len(batch[self.input_key]))
        self.metrics_of(phase).update(*self.metric_inputs(outputs.detach(), batch))

    # ---- reading and logging -------------------------------------------------------------------------------

    def losses_of(self, phase: str) -> MeanMetric:
        """The mean loss of a phase so far."""
        return cast(MeanMetric, self.losses[f"{phase}_loss"])

    def metrics_of(self, phase: str) -> MetricCollection:
        """The metrics of a phase so far."""
        return cast(MetricCollection, self.metrics[f"{phase}_metrics"])

    def compute_phase(self, phase: str) -> dict[str, float]:
        """Reads the metrics of a phase over all samples since the last reset, and resets them."""
        loss, metrics = self.losses_of(phase), self.metrics_of(phase)
        computed = metrics.compute()
        assert set(computed) == set(self.metric_names), "build_metrics and metric_names differ"
        values = {f"{phase}/loss": float(loss.compute())}
        values |= {f"{phase}/{name}": float(computed[name]) for name in self.metric_names}
        loss.reset()
        metrics.reset()
        return values

    def on_fit_start(self) -> None:
        if self._average:
            self._average.swap_out()  # where an earlier fit left it in the network
        self.micro_batches.begin(self.trainer, self.trainer.datamodule)  # type: ignore[attr-defined]
        if isinstance(self.trainer.datamodule, DataModule):  # type: ignore[attr-defined]
            choose_threads(self, self.trainer.datamodule, self.trainer)  # type: ignore[attr-defined]
            compile_first(self, self.trainer.datamodule, self.trainer)  # type: ignore[attr-defined]
            plan_calls(self, self.trainer.datamodule, self.trainer)  # type: ignore[attr-defined]
        self._guard = FiniteGuard(self)
        if self._guard_state:
            self._guard.load(self._guard_state)

    @property
    def guard(self) -> FiniteGuard:
        """What watches the losses of this fit."""
        assert self._guard is not None, "training has not started"
        return self._guard

    def on_train_start(self) -> None:
        self._num_steps = self.count_steps()
        # What the trainer works out anew at each question; strategies of several processes can hold back gradients
        self._world_size, self._rank, self._step_device = data_size(self.trainer), data_rank(self.trainer), self.device
        self._hold_back = getattr(self.trainer.strategy, "block_backward_sync", nullcontext)
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        self._calls = self.micro_batches.choose_calls()
        take_up(optimizer.optimizer, self._optim_settings if self.new_optim_settings else None)
        # Left over from the sanity check, which must not count.
        self.losses_of("val").reset()
        self.metrics_of("val").reset()

    def _log_interval(self, item: int) -> None:
        """Reads and logs the loss since the last time: every `log_every_n_steps` steps of an epoch, and at its end."""
        trainer = self.trainer
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.steps_in_epoch(item) % every and item + 1 < trainer.num_training_batches:
            return
        self._count_seen()
        self.guard.check()
        if not self.guard.begin_interval("interval"):
            self._interval_loss.reset()
            return  # all steps were skipped
        loss = float(self._interval_loss.compute())
        self._interval_loss.reset()
        self.guard.check_values({"train/loss_step": loss})
        self.guard.note(trainer.global_step, loss)
        self.latest["loss"] = loss
        values = {"train/loss_step": loss, "train/lr": trainer.optimizers[0].param_groups[0]["lr"]}
        if self._grad_norm is not None:
            values["train/grad_norm"] = float(self._grad_norm)  # before clipping
        if self.guard.skips or self.guard.num_skipped:
            values["train/skipped_steps"] = float(self.guard.num_skipped)
        self._write(values)

    def steps_in_epoch(self, item: int) -> int:
        """Optimiser steps of this epoch up to the end of an item of the loader."""
        loader = self.trainer.train_dataloader
        batches = loader.batch_indices(item).stop if isinstance(loader, BatchLoader) else item + 1
        return -(-batches // self.engine.accumulate_batches)

    def on_train_epoch_end(self) -> None:
        self._count_seen()
        self.guard.check()
        if not self.guard.begin_interval("epoch"):
            raise TrainingError(f"All steps of epoch {self.current_epoch + 1} were skipped. {ADVICE}")
        values = self.compute_phase("train")
        self.guard.check_values(values)
        self.latest["loss"] = values["train/loss"]
        self._publish(values)

    def on_train_end(self) -> None:
        if self._average:
            self._average.swap_in()  # what the run has learned

    def on_validation_epoch_start(self) -> None:
        if self._average and self.trainer.state.fn == "fit":
            self._average.swap_in()

    def on_validation_epoch_end(self) -> None:
        if self._average and self.trainer.state.fn == "fit":
            self._average.swap_out()
        if self.trainer.sanity_checking:
            return
        values = self.compute_phase("val")
        if self.trainer.state.fn == "fit":
            self.guard.check_values(values)
        self.latest |= {name: value for name, value in values.items() if name != "val/loss"}
        self._publish(values)

    def on_test_epoch_end(self) -> None:
        self._publish(self.compute_phase("test"))

    def _publish(self, values: dict[str, float]) -> None:
        # For checkpoints and early stopping; the loggers get them on the axis of optimiser steps.
        self.log_dict(values, logger=False, rank_zero_only=False)
        self._write({**values, "epoch": float(self.current_epoch)})

    def _write(self, values: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log_metrics(values, step=self.trainer.global_step)

    # ---- optimisation and checkpoints ----------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = build_optimizer(self.optim, self.net)
        step_by_kind(optimizer)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        self._optim_settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["micro_batch_size"] = self.micro_batches.found
        checkpoint["epoch_so_far"] = save_epoch(self.trainer, self.train_metrics, self._seen)
        loader = self.trainer.train_dataloader
        checkpoint["batches_done"] = loader.batches_done if isinstance(loader, BatchLoader) else 0
        if self._average:
            self._average.save(checkpoint)
        if self._guard:
            self._guard.check_checkpoint(checkpoint["state_dict"])
            checkpoint["non_finite"] = self._guard.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING:
            return  # all but training takes the weights that were saved to be used
        self.micro_batches.restore(checkpoint["micro_batch_size"])
        load_epoch(self.trainer, self.train_metrics, self._seen, checkpoint["epoch_so_far"])
        self._guard_state = checkpoint["non_finite"]
        self.loops_to_restore = checkpoint["loops"]
        self.batches_done = checkpoint["batches_done"]
        if self._average:
            self._average.load(checkpoint)
        take_raw(checkpoint)

    @property
    def train_metrics(self) -> nn.ModuleDict:
        """Everything that is added up over a training epoch."""
        parts = {"loss": self.losses_of("train"), "metrics": self.metrics_of("train"), "interval": self._interval_loss}
        return nn.ModuleDict(parts)

    def count_steps(self) -> int:
        """Optimiser steps of the whole run, which the schedule is laid out for."""
        return count_steps(self)
