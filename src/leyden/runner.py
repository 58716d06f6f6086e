"""One run from a composed config: check, wire, fit, test, write the run folder, return the objective."""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from leyden.callbacks.checkpoint import Checkpoint
from leyden.callbacks.interruption import Interruption
from leyden.callbacks.loggers import History, TensorBoard
from leyden.callbacks.memory_limit import MemoryLimit
from leyden.config import validate
from leyden.data.datamodule import DataModule
from leyden.data.workers import shut_down
from leyden.engine.checkpoint import read_checkpoint
from leyden.engine.precision import check_precision
from leyden.engine.settings import Engine
from leyden.engine.task import Task
from leyden.errors import ConfigError, HardwareError, Interrupted, ProcessError, TrainingError
from leyden.hardware.allocator import keep_freed_memory
from leyden.hardware.plan import HardwarePlan, plan_hardware
from leyden.hardware.probe import probe_hardware
from leyden.hardware.threads import set_threads
from leyden.launch.external import publish
from leyden.launch.job import Job
from leyden.launch.place import Place, find_place
from leyden.launch.supervisor import run_processes
from leyden.runs.folder import RunRecord, command_line, correct_end, hash_config, write_json
from leyden.runs.results import build_table, compute_baseline, predict_probes
from leyden.runs.resume import Stopped, check_resumable, find_states, load_stopped, resume_command, set_aside
from leyden.sharding import all_finite, split_state
from leyden.wiring import Assembly, assemble, drop_replaced_keys

log = logging.getLogger(__name__)


def run(cfg: DictConfig, run_dir: Path, overrides: list[str]) -> float | None:
    """Trains and tests one experiment, in this process or in one for each device.

    Args:
        cfg: the composed config.
        run_dir: the run's own folder; exists.
        overrides: the command line's overrides.

    Returns:
        The objective: the value of `objective.metric` at the best checkpoint, or None where the metric is
        not known at the end.

    Raises:
        ConfigError, HardwareError, DataError: before training.
        TrainingError: when the run went wrong in a way its numbers would not show.
        ProcessError: when one of several processes failed.
        Interrupted: when the run was told to stop.
    """
    quiet_libraries()
    drop_replaced_keys(cfg, overrides)
    validate(cfg)
    log_overrides(cfg, overrides)
    place = find_place()
    plan = plan_run(cfg, place)
    if place is None and plan.num_devices == 1:
        return run_here(cfg, run_dir, plan)
    if isinstance(plan.devices, list):  # so that all processes of the run take the same
        cfg.hardware.devices, cfg.hardware.strategy = plan.devices, plan.strategy
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    setup: Any = OmegaConf.to_container(HydraConfig.get().job_logging, resolve=True)
    job = Job(config, hash_config(config), str(run_dir.absolute()), command_line(), setup)
    if place is None:
        return run_in_processes(job, plan.num_devices)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError(
            f"A sweep (-m) cannot be started by {place.launcher}, whose processes are those of one run. "
            "Use python train.py -m hardware=..., which starts the processes of each job."
        )
    publish(place, job)
    return run_here(OmegaConf.create(config), run_dir, plan)


def plan_run(cfg: DictConfig, place: Place | None) -> HardwarePlan:
    """Chooses the devices, and checks what they have to share.

    Args:
        cfg: the whole config.
        place: of this process, where several have been started.

    Raises:
        ConfigError, HardwareError: where that cannot be.
    """
    settings: dict[str, Any] = OmegaConf.to_container(cfg.hardware, resolve=True)  # type: ignore[assignment]
    if place is not None:
        settings |= share_place(settings, place)
    plan = plan_hardware(probe_hardware(), **settings)
    check_precision(Engine(**cfg.engine).number_format, plan.accelerator)
    plan.settings.check_deterministic(cfg.engine.deterministic)
    count = plan.data_parallel_size if place is None else place.world_size // plan.tensor_parallel_size
    if count > cfg.data.get("batch_size", count):
        raise ConfigError(
            f"`data.batch_size` is {cfg.data.batch_size}, but {count} devices share each batch. "
            f"Use data.batch_size={count} or more, or fewer devices."
        )
    return plan


def share_place(settings: dict[str, Any], place: Place) -> dict[str, Any]:
    """The devices of one machine where the processes have been started already.

    Raises:
        HardwareError: where the settings ask for another number of them.
    """
    started = f"{place.launcher} started {place.local_world_size} processes on this machine"
    if settings["strategy"] == "auto":
        raise HardwareError(
            f"{started}, but `hardware.strategy` is auto, which is one process. Use hardware=ddp (GPUs), "
            "hardware=ddp_cpu, or start one process without it."
        )
    devices = settings["devices"]
    count = len(devices) if isinstance(devices, list) else devices
    if count not in ("auto", "idle", place.local_world_size):
        raise HardwareError(
            f"{started}, but `hardware.devices` is {devices}. Use hardware.devices=auto, or start {count} processes."
        )
    return {"devices": devices if isinstance(devices, list) else place.local_world_size}


def run_in_processes(job: Job, count: int) -> float | None:
    """Lets a process for each device train, and gives what the first of them found.

    Raises:
        ProcessError: when one of them failed.
        Interrupted: when they were told to stop.
    """
    run_dir = Path(job.run_dir)
    try:
        run_processes(job, count)
    except (ProcessError, Interrupted) as err:
        correct_end(run_dir, "failed" if isinstance(err, ProcessError) else err.state, str(err))
        if isinstance(err, ProcessError) and find_states(run_dir):
            err.args = (f"{err} Go on with: {resume_command(run_dir)}",)
        raise
    results = json.loads((run_dir / "metrics.json").read_text(encoding="utf-8"))
    objective: float | None = results.get("objective")
    return objective


def run_here(cfg: DictConfig, run_dir: Path, plan: HardwarePlan | None = None) -> float | None:
    """Trains and tests in this process, alone or as one of several; a checked config is taken as it is."""
    quiet_libraries()
    plan = plan or plan_run(cfg, find_place())
    log.info("Hardware: %s", plan.reason)
    if plan.accelerator == "cpu":
        # Lightning lets torch ask NVML whether there is a GPU, and torch's optimisers ask that at every step
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
        keep_freed_memory()
    # Debugging aid of deterministic algorithms: each new tensor is filled before it is written (torch 2.14)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_threads(plan.num_threads)
    plan.settings.apply()
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    interruption = Interruption()
    own_callbacks = [interruption, *MemoryLimit.of(plan.settings.memory_fraction)]
    with interruption.handled():
        stopped = load_stopped(run_dir) if cfg.resume else None
        assembly, found = None, None
        if stopped is not None:  # what is wrong is said before the folder is touched
            assembly = assemble(cfg, plan, run_dir, own_callbacks)
            found = fingerprint(assembly)
            check_resumable(stopped, assembly.config, found, cfg.resume_force)
            set_aside(stopped)
            log.info("Resuming after %d epochs (step %d).", stopped.epochs, stopped.steps)
        record = (RunRecord.resumed if stopped else RunRecord)(run_dir, config, command_line())
        interruption.abort = lambda: record.finish("interrupted", "interrupted twice, so at once")
        record.update(hardware=plan.reason)
        try:
            assembly = assembly or assemble(cfg, plan, run_dir, own_callbacks)
            if plan.accelerator == "cuda":
                from leyden.runs.plan import warn_of_memory  # tensors without memory take a second to import

                warn_of_memory(assembly)
            if isinstance(assembly.data, DataModule):
                record.update(data=found or fingerprint(assembly), skipped=assembly.data.skipped)
            try:
                objective = fit_and_test(assembly, run_dir, stopped)
            finally:
                close_loggers(assembly)
                shut_down()
                size = assembly.task.micro_batches.size if isinstance(assembly.task, Task) else None
                record.update(num_threads=torch.get_num_threads(), micro_batch_size=size)
        except Interrupted as err:
            end_interrupted(record, err, run_dir)
            raise
        except BaseException as err:
            if interruption.received is not None:  # the same signal ended a process that the run needs
                end_interrupted(record, interrupted := Interrupted(interruption.received), run_dir)
                raise interrupted from err
            record.finish("failed", f"{type(err).__name__}: {err}")
            raise
        record.finish("finished")
    return objective


def end_interrupted(record: RunRecord, err: Interrupted, run_dir: Path) -> None:
    """Writes down how a run was stopped, and says how to go on."""
    record.finish(err.state, str(err))
    at = f" at step {err.step}" if err.step else ""
    how = f"Go on with: {resume_command(run_dir)}" if find_states(run_dir) else "Nothing was saved yet: start it again."
    log.warning("The run was %s%s. %s", err, at, how)


def fingerprint(assembly: Assembly) -> dict[str, Any] | None:
    """The fingerprint of a run's data, where it is Leyden's."""
    return assembly.data.fingerprint() if isinstance(assembly.data, DataModule) else None


def fit_and_test(assembly: Assembly, run_dir: Path, stopped: Stopped | None = None) -> float | None:
    """Fits (from where a run stopped), tests the best weights, prints the table and writes metrics.json."""
    task, data, trainer, config = assembly.task, assembly.data, assembly.trainer, assembly.config
    describe(assembly)
    for logger in trainer.loggers:
        if stopped is not None and isinstance(logger, TensorBoard | History):
            logger.resume_from(stopped.steps)
        elif isinstance(logger, TensorBoard):
            logger.log_config(config)
    if stopped is None or stopped.checkpoint is None:
        trainer.fit(task, datamodule=data)
    else:
        if isinstance(task, Task):
            if task.thread_choice:
                task.thread_choice.before = stopped.num_threads
            task.new_optim_settings = stopped.config is not None and stopped.config["optim"] != config["optim"]
        trainer.strategy.checkpoint_io.lend(stopped.checkpoint, dict(stopped.content))  # type: ignore[attr-defined]
        stopped.content.clear()
        trainer.fit(task, datamodule=data, ckpt_path=str(stopped.checkpoint), weights_only=True)
    num_steps = trainer.global_step
    callback = next((c for c in trainer.checkpoint_callbacks if isinstance(c, Checkpoint)), None)
    # What was measured before the run stopped still counts where nothing was left to train
    results = dict(stopped.metrics) if stopped is not None else {}
    results |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    check_trained(task, num_steps, results)
    if callback is not None:
        tested = callback.path_to_test
        content = check_checkpoint(tested)
        results |= {k: v for k, v in content["leyden"]["metrics"].items() if k.startswith("val/")}
        if config["test"]:
            trainer.strategy.checkpoint_io.lend(tested, content)  # type: ignore[attr-defined]
        else:
            task.load_state_dict(split_state(task, content["state_dict"]))
        del content  # as large as the network and its optimiser's state
    else:
        log.warning("callbacks.checkpoint is null: no checkpoint was kept, so the final weights are tested.")
    objective = results.get(config["objective"]["metric"])
    if config["test"]:
        trainer.test(
            task,
            datamodule=data,
            verbose=False,
            weights_only=True,
            ckpt_path=str(tested) if callback else None,
        )
        results |= {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test/")}
    if config["objective"]["metric"].startswith("test/"):
        objective = results.get(config["objective"]["metric"])
    report(assembly, results, objective, num_steps, run_dir)
    return objective


def report(
    assembly: Assembly, results: dict[str, float], objective: float | None, num_steps: int, run_dir: Path
) -> None:
    """Prints the table, writes metrics.json and TensorBoard's HPARAMS."""
    task, data, trainer = assembly.task, assembly.data, assembly.trainer
    baseline: tuple[str, dict[str, float]] | None = None
    if isinstance(task, Task) and isinstance(data, DataModule):
        results |= predict_probes(task, data)
        results |= task.summary(data)
        if assembly.config["test"] and data.splits:  # the targets of a Dataset are not known without reading it
            baseline = compute_baseline(task, data)
    bad = [name for name, value in results.items() if not math.isfinite(value)]
    # By all processes, since counts are summed over them
    figures = task.draw() if isinstance(task, Task) and assembly.config["test"] else {}
    if not trainer.is_global_zero:
        return
    finite = {name: value for name, value in results.items() if name not in bad}
    final = {**finite, **({"objective": objective} if objective is not None else {})}
    write_json(run_dir / "metrics.json", dict(sorted(final.items())))
    from leyden.runs.pictures import draw_curves, write_pictures  # late: it imports polars

    history = run_dir / "history.csv"
    write_pictures({**figures, **({"curves": draw_curves(history)} if history.is_file() else {})}, run_dir / "pictures")
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoard):
            logger.log_figures(figures, num_steps)
            shown = {name: value for name, value in final.items() if name == "objective" or name.startswith("test/")}
            logger.log_results(assembly.config, shown, num_steps)
    reference = data.reference if isinstance(data, DataModule) else None
    log.info("%s", build_table(results, baseline, reference, getattr(task, "metric_names", ())))
    if isinstance(data, DataModule):
        log_skipped(data.skipped)
    log.info("Run folder: %s", run_dir)
    if bad:
        raise TrainingError(f"{', '.join(f'`{name}` is {results[name]}' for name in bad)}, so the run does not count.")


def log_skipped(skipped: list[str], limit: int = 20) -> None:
    """Lists what the data left out because it could not be read; run.json has the whole list."""
    if skipped:
        more = [f"... and {len(skipped) - limit} more, see `skipped` in run.json"] if len(skipped) > limit else []
        log.warning("%d file(s) skipped:\n  %s", len(skipped), "\n  ".join([*skipped[:limit], *more]))


def close_loggers(assembly: Assembly) -> None:
    """Ends the event file, also of a run that failed."""
    for logger in assembly.trainer.loggers:
        if isinstance(logger, TensorBoard):
            logger.close()


def describe(assembly: Assembly) -> None:
    """Says in two lines what is trained on what."""
    task, data, trainer = assembly.task, assembly.data, assembly.trainer
    if isinstance(data, DataModule):
        counts = ", ".join(f"{data.num_samples(name):,} {name}" for name in ("train", "val", "test"))
        log.info("Data: %s: %s; global batch %d", data.describe(), counts, data.batch_size)
    net = getattr(task, "net", task)
    num_parameters = sum(p.numel() for p in net.parameters())
    log.info("Model: %s, %s parameters; %s epochs", type(net).__name__, f"{num_parameters:,}", trainer.max_epochs)


def check_checkpoint(path: Path) -> dict[str, Any]:
    """Loads the checkpoint that will be tested and returns it.

    Raises:
        DataError: when it does not load.
        TrainingError: when it is not there or holds weights that are not finite.
    """
    if not path.is_file():
        raise TrainingError(f"The checkpoint {path} was not written. Is the run folder writable and the disk not full?")
    content = read_checkpoint(path)
    bad = [k for k, v in content["state_dict"].items() if v.is_floating_point() and not torch.isfinite(v).all()]
    if bad:
        raise TrainingError(f"The checkpoint {path} has values that are not finite in {bad[0]}. Lower optim.lr.")
    return content


def check_trained(task: torch.nn.Module, num_steps: int, results: dict[str, float]) -> None:
    """The guard that ends every run.

    Raises:
        TrainingError: when no step was taken, or weights or metrics are not finite.
    """
    if num_steps == 0:
        raise TrainingError(
            "No optimiser step was taken, so nothing was learned. Look at trainer.max_epochs, trainer.max_steps and "
            "trainer.limit_train_batches."
        )
    bad = [name for name, p in task.named_parameters() if not all_finite(p)]
    if bad:
        raise TrainingError(f"The weights {bad[0]} are not finite after training. Lower optim.lr or clip the gradient.")
    wrong = [name for name, value in results.items() if not math.isfinite(value)]
    if wrong:
        raise TrainingError(f"`{wrong[0]}` is {results[wrong[0]]} after training.")


def log_overrides(cfg: DictConfig, overrides: list[str]) -> None:
    """Shows the values that the command line's overrides came to."""
    keys = [override.lstrip("+").split("=", 1)[0] for override in overrides if "=" in override]
    values = ((key, OmegaConf.select(cfg, key)) for key in dict.fromkeys(keys) if "/" not in key and "@" not in key)
    # A group's choice (optim=sgd) is a whole section, or none
    shown = [f"{k}={v}" for k, v in values if not isinstance(v, DictConfig) and (v is not None or "." in k)]
    log.info("Experiment: %s%s", cfg.name, f" with {' '.join(shown)}" if shown else "")


def quiet_libraries() -> None:
    """Sends warnings to the log, and keeps Lightning's own notes and second console handler out of the way."""
    logging.captureWarnings(True)
    for name in ("lightning.pytorch", "lightning.fabric"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        library.setLevel(logging.WARNING)
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}"
    for expected in (
        ".*does not have many workers.*",  # batches from memory need no worker processes
        ".*smaller than the logging interval.*",  # every epoch is logged as well
        ".*Total length of `list` across ranks is zero.*",  # an empty validation split was asked for, and said
        ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run writes where it wrote before
        ".*sync_dist=True.*",  # the metrics are summed over all processes before they are logged
        ".*isinstance.treespec, LeafSpec.*",  # Lightning 2.6 with torch 2.12 and later
    ):
        warnings.filterwarnings("ignore", message=expected)
