"""From a config to built objects: the only caller of `hydra.utils.instantiate`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from hydra.utils import instantiate
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import DoublePrecision
from omegaconf import DictConfig, OmegaConf
from torch import nn

from leyden.callbacks.checkpoint import Checkpoint
from leyden.callbacks.early_stopping import EarlyStopping
from leyden.callbacks.loggers import History
from leyden.config import FACTS
from leyden.data.datamodule import DataModule
from leyden.engine.checkpoint import CheckpointWriter
from leyden.engine.compile import compile_net
from leyden.engine.foreign import check_foreign, step_arguments
from leyden.engine.parallel import check_sharding, explain_batch_norm
from leyden.engine.precision import convert_net, trainer_precision
from leyden.engine.recompute import recompute_blocks
from leyden.engine.settings import Engine
from leyden.engine.task import Task
from leyden.engine.threads import ThreadChoice
from leyden.errors import USER_ERRORS, ConfigError
from leyden.hardware.layout import lay_out
from leyden.hardware.plan import HardwarePlan
from leyden.hardware.strategies import build_strategy
from leyden.launch.place import find_place
from leyden.signatures import locate, parameters

log = logging.getLogger(__name__)


@dataclass
class Assembly:
    """Everything a run needs.

    Attributes:
        task: the LightningModule.
        data: the datamodule, set up.
        trainer: Lightning's Trainer, on the planned hardware.
        plan: the hardware and the reason for it.
        config: the resolved config with the facts of the data filled in; what checkpoints keep.
    """

    task: LightningModule
    data: LightningDataModule
    trainer: Trainer
    plan: HardwarePlan
    config: dict[str, Any]


def drop_replaced_keys(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Drops settings of what the command line replaces by something else.

    `model.net._target_=torchvision.models.resnet18` leaves the old network's arguments in the config, and
    `experiment=vision model=vision_vit` those that the experiment sets for its own network. Where the new class does
    not name them and the command line did not give them, they go, and the log says so.
    """
    given = {override.lstrip("+~").split("=", 1)[0] for override in overrides}
    for key in sorted(key for key in given if key.endswith("._target_")):
        _drop_foreign_keys(cfg, key.removesuffix("._target_"), given)
    for group, blocks in REPLACEABLE.items():
        if group in given:
            for block_key in blocks:
                _drop_foreign_keys(cfg, block_key, given, keep_if_any=True)


# Groups that an experiment sets values for, and the blocks that such values go to.
REPLACEABLE = {
    "data": ("data",),
    "model": ("model", "model.net"),
    "optim": ("optim",),
    "schedule": ("schedule",),
}


def _drop_foreign_keys(cfg: DictConfig, block_key: str, given: set[str], keep_if_any: bool = False) -> None:
    """Drops a block's keys that its target does not name; with `keep_if_any` none of a target that takes any."""
    block: Any = OmegaConf.select(cfg, block_key)
    if not isinstance(block, DictConfig) or "_target_" not in block:
        return
    named, takes_any = parameters(locate(block._target_))
    if takes_any and keep_if_any:
        return
    stale = [
        str(name)
        for name in block
        if not str(name).startswith("_") and name not in named and f"{block_key}.{name!s}" not in given
    ]
    OmegaConf.set_struct(block, False)
    for name in stale:
        del block[name]
    if stale:
        log.info("%s is now %s; dropped what was set for another: %s", block_key, block._target_, ", ".join(stale))


def build_data(cfg: DictConfig, only_outline: bool = False) -> LightningDataModule:
    """Builds the datamodule and loads its splits, or with `only_outline` their shapes where these are known."""
    try:
        data: LightningDataModule = instantiate(cfg.data, _convert_="all")
    except Exception as err:
        cause = _user_error(err)
        if cause is None:
            raise
        raise cause from err
    if isinstance(data, DataModule):
        data.settings = OmegaConf.to_container(cfg.data, resolve=True)  # type: ignore[assignment]
    if only_outline and isinstance(data, DataModule) and (outline := data.outline()) is not None:
        data.splits = outline
        return data
    data.prepare_data()
    data.setup("fit")
    if cfg.test and isinstance(data, DataModule) and data.num_samples("test") == 0:
        raise ConfigError(f"`test` is true, but {data.describe()} has no test data. Give data.test, or set test=false.")
    return data


def fill_facts(block: DictConfig, key: str, facts: dict[str, Any]) -> None:
    """Writes what the data fixes (`num_classes`, ...) into a block whose target takes it.

    Raises:
        ConfigError: when the config says something else than the data.
    """
    named, _ = parameters(locate(block._target_))
    OmegaConf.set_struct(block, False)
    for name in sorted(FACTS & (set(named) | set(block))):
        given = block.get(name)
        if name in facts and given is None:
            block[name] = facts[name]
        elif name in facts and name in named and given != facts[name]:
            raise ConfigError(
                f"`{key}.{name}` is {given}, but the data has {facts[name]}. Leave it null to take it from the data."
            )
        elif given is None and named[name].default is named[name].empty:
            raise ConfigError(
                f"`{key}._target_` {block._target_} needs {name}, which this data does not have "
                f"(it has {', '.join(sorted(facts))}). Choose another model for this data, or set {key}.{name}."
            )


def build_task(cfg: DictConfig, facts: dict[str, Any]) -> LightningModule:
    """Builds the network and the task around it, with the data's facts filled into `cfg`."""
    for block, key in ((cfg.model, "model"), (cfg.model.get("net"), "model.net")):
        if block is not None:
            fill_facts(block, key, facts)
    named, _ = parameters(locate(cfg.model._target_))
    wired = {
        "optim": lambda: instantiate(cfg.optim, _convert_="all"),
        "schedule": lambda: instantiate(cfg.schedule, _convert_="all"),
    }
    arguments = {name: build() for name, build in wired.items() if name in named}
    try:
        task: LightningModule = instantiate(cfg.model, **arguments, _convert_="all")
    except Exception as err:
        cause = _user_error(err)
        if cause is None:
            raise
        raise cause from err
    if not isinstance(task, Task):
        log.warning(
            "%s is a plain LightningModule: it trains as it says itself, without Leyden's metrics over whole epochs, "
            "baseline, seeded steps and watch over losses that are not finite%s.",
            cfg.model._target_,
            "".join(f"; `{name}` does not reach it" for name in wired if name not in named),
        )
    return task


def _user_error(err: BaseException | None) -> BaseException | None:
    """The first error of Leyden's own in a chain of causes (Hydra wraps what a constructor raises)."""
    while err is not None:
        if isinstance(err, USER_ERRORS):
            return err
        err = err.__cause__ or err.__context__
    return None


def check_fit(task: Task, data: DataModule) -> None:
    """Runs two training rows through the task, so that a mismatch is explained before training.

    Raises:
        ConfigError: when the network cannot take the data's batches.
    """
    if data.mixes_labels and not task.takes_mixed_labels:
        raise ConfigError(
            f"`data.augment` mixes labels, but the loss of {type(task).__name__} does not use `label_probability`. "
            "Remove what mixes labels (e.g. ~data.augment.mixup), or use it in compute_loss and set the task's "
            "takes_mixed_labels = True."
        )
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.modules())
    if has_batch_norm:
        if data.batch_size == 1:
            raise ConfigError(
                "`data.batch_size` is 1, but `model.net` has BatchNorm, which cannot train on one sample. "
                "Use data.batch_size=2 or more, or a network with GroupNorm or LayerNorm."
            )
        data.min_last_train = 2
    batch = data.transform_batch(data.first_rows(2), None)
    was_training = task.training
    task.eval()
    try:
        with torch.no_grad():
            task.compute_loss(batch)
    except USER_ERRORS:
        raise
    except Exception as err:
        shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
        raise ConfigError(
            f"`model.net` ({type(task.net).__module__}.{type(task.net).__name__}) cannot take a batch of "
            f"{data.describe()} with shapes {shapes}: {str(err).splitlines()[0] if str(err) else type(err).__name__}. "
            "Choose a network for this data, or change its arguments under model.net."
        ) from err
    finally:
        task.train(was_training)


def build_callbacks(cfg: DictConfig, config: dict[str, Any], has_val: bool) -> list[Callback]:
    """Builds the callbacks; what is not measured while training is not monitored, and the last state is kept."""
    blocks = {name: block for name, block in (cfg.callbacks or {}).items() if block is not None}
    metric = cfg.objective.metric
    unmeasured = ("test/",) if has_val else ("val/", "test/")
    monitored = {metric, *(block.get("monitor") for block in blocks.values())} - {None}
    for name in sorted(name for name in monitored if name.startswith(unmeasured)):
        is_test = name.startswith("test/")
        why = "`%s` is known only after training" if is_test else "There is no validation split: `%s` does not exist"
        log.warning(f"{why}, so the last weights count, not the best.", name)
    for block in blocks.values():
        if (block.get("monitor") or "").startswith(unmeasured):
            block.monitor = None
    callbacks: list[Callback] = []
    for block in blocks.values():
        if block.get("monitor", metric) is None and issubclass(locate(block._target_), EarlyStopping):  # type: ignore[arg-type]
            continue
        callbacks.append(instantiate(block, _convert_="all"))
    for callback in callbacks:
        if isinstance(callback, Checkpoint):
            callback.config = config
    return callbacks


def build_loggers(cfg: DictConfig, run_dir: Path) -> list[Logger]:
    """Builds the loggers the config asks for, and history.csv, which every run has."""
    loggers: list[Logger] = [History(str(run_dir))]
    for block in (cfg.logger or {}).values():
        if block is not None:
            named, _ = parameters(locate(block._target_))
            folder = {"save_dir": str(run_dir)} if "save_dir" in named and "save_dir" not in block else {}
            loggers.append(instantiate(block, **folder, _convert_="all"))
    return loggers


def build_trainer(
    cfg: DictConfig,
    plan: HardwarePlan,
    run_dir: Path,
    callbacks: list[Callback],
    loggers: list[Logger],
    owns_step: bool = True,
) -> Trainer:
    """Builds Lightning's Trainer from the sections `trainer`, `engine` and the hardware plan."""
    engine = Engine(**cfg.engine)
    # A Leyden task accumulates and clips in its own step; a plain LightningModule leaves that to the trainer.
    step = {} if owns_step else step_arguments(engine)
    place = find_place()
    num_nodes = place.num_nodes if place else 1
    precision = trainer_precision(engine.number_format, owns_step)
    doubles = plan.is_sharded and precision == "64-true"  # which the trainer refuses by name, but not as a plugin
    trainer: Trainer = instantiate(
        cfg.trainer,
        **{**plan.trainer_arguments(), "strategy": build_strategy(plan, num_nodes)},
        **({"inference_mode": False} if plan.is_sharded else {}),  # its tensors cannot be trained on later (torch 2.14)
        precision=None if doubles else precision,
        benchmark=plan.settings.cudnn_benchmark,
        **step,
        deterministic=engine.deterministic,
        callbacks=callbacks,
        logger=loggers,
        default_root_dir=str(run_dir),
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=any(callback.__class__.__name__ == "Progress" for callback in callbacks),
        use_distributed_sampler=False,
        plugins=[
            CheckpointWriter(),
            *([LightningEnvironment()] if place else []),
            *([DoublePrecision()] if doubles else []),
        ],
        num_nodes=num_nodes,
        sync_batchnorm=plan.syncs_batch_norm,
        _convert_="all",
    )
    return trainer


def assemble(cfg: DictConfig, plan: HardwarePlan, run_dir: Path, callbacks: Sequence[Callback] = ()) -> Assembly:
    """Builds everything a run needs, in the order in which things can go wrong cheaply.

    Args:
        cfg: the composed config.
        plan: the hardware.
        run_dir: the run's own folder.
        callbacks: of the runner's own; they come after those of the config.

    Raises:
        ConfigError, DataError: before any training.
    """
    cfg = cast(DictConfig, OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)))
    data = build_data(cfg)
    facts = getattr(data, "facts", {})
    seed_everything(cfg.seed, verbose=False)
    task = build_task(cfg, facts)
    if isinstance(task, Task):
        task.engine = Engine(**cfg.engine)
        task.micro_batches.folder = Path(cfg.paths.outputs) / cfg.name / ".micro_batch_sizes"
        convert_net(task.net, task.engine.number_format)
        lay_out(task.net, plan.channels_last, plan.accelerator)
        if task.engine.activation_checkpointing:
            recompute_blocks(task.net)
        if plan.is_sharded:
            num_nodes = place.num_nodes if (place := find_place()) else 1
            check_sharding(task.net, task.engine, plan.data_parallel_size * num_nodes, plan.tensor_parallel_size)
        explain_batch_norm(task.net, plan.strategy, plan.syncs_batch_norm)
    else:
        if plan.is_sharded:
            raise ConfigError(
                f"`hardware.strategy` {plan.strategy} cuts the network of a Leyden task into parts, which "
                f"{cfg.model._target_} is not. Use hardware=ddp, or a task of leyden.engine.task.Task."
            )
        check_foreign(Engine(**cfg.engine), task, cfg.model._target_)
        if plan.channels_last is True:
            raise ConfigError(
                f"`hardware.channels_last` is true, but {cfg.model._target_} is a plain LightningModule, which lays "
                "out its networks itself: self.to(memory_format=torch.channels_last). Use hardware.channels_last=auto."
            )
    if isinstance(task, Task) and isinstance(data, DataModule):
        check_fit(task, data)
    if isinstance(task, Task):
        compile_net(task.net, task.engine.compile_mode, plan.accelerator)
    if plan.num_threads == "auto":
        if not (isinstance(task, Task) and isinstance(data, DataModule)):
            raise ConfigError(
                f"hardware.num_threads=auto measures a step of Leyden's own, which {cfg.model._target_} on "
                f"{cfg.data._target_} is not. Use hardware.num_threads=null, or a number."
            )
        task.thread_choice = ThreadChoice()
    config = OmegaConf.to_container(cfg)
    assert isinstance(config, dict)
    has_val = not isinstance(data, DataModule) or data.num_samples("val") > 0
    built = [*build_callbacks(cfg, config, has_val), *callbacks]  # type: ignore[arg-type]
    trainer = build_trainer(cfg, plan, run_dir, built, build_loggers(cfg, run_dir), isinstance(task, Task))
    return Assembly(task, data, trainer, plan, config)  # type: ignore[arg-type]
