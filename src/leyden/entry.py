"""The command line of training: Hydra composes the config, the runner runs it, errors become one message.

Nothing here imports torch before the config is composed, so that --help and --cfg answer at once.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from leyden.config import conf_dir, conf_dirs, list_options
from leyden.errors import USER_ERRORS, Interrupted, ProcessError
from leyden.launch.place import Place, find_place

log = logging.getLogger("leyden")

GROUPS = (
    "experiment",
    "data",
    "model",
    "optim",
    "schedule",
    "engine",
    "hardware",
    "trainer",
    "callbacks",
    "logger",
    "sweep",
    "debug",
)

JOB_FAILED = "A job of the sweep failed; see its train.log."

EXAMPLES = """\
  python train.py                                              the default experiment
  python train.py experiment=vision trainer.max_epochs=3       another one, shorter
  python train.py experiment=nlp optim.lr=0.003 seed=1         other settings
  python train.py -m experiment=regression seed=0,1,2          a sweep, each job in its own folder
  python train.py experiment=regression data=table data.path=prices.csv data.target=price
                                                               your own table"""


def help_text() -> str:
    """What `--help` prints: experiments, groups, examples."""
    experiments = list_options("experiment")
    width = max(map(len, experiments), default=0) + 2
    listed = "\n".join(f"  {name:<{width}}{line}" for name, line in experiments.items())
    groups = "\n".join(f"  {group:<12}{', '.join(list_options(group))}" for group in GROUPS[1:])
    return f"""\
Trains and tests an experiment: python train.py [GROUP=OPTION ...] [KEY=VALUE ...]

Experiments (experiment=NAME):
{listed}

Groups (GROUP=OPTION, GROUP=null for none where that makes sense):
{groups}

Examples:
{EXAMPLES}

Options: --cfg job (print the config and stop), -m (sweep over comma-separated values), --config-dir DIR (more
configs), --hydra-help (the rest). Every key of --cfg job is set by KEY=VALUE; add a new one by +KEY=VALUE.
Results go to outputs/<experiment>/<date>_<time>/; watch them with: tensorboard --logdir outputs
"""


def outputs_folder(*, _root_: DictConfig) -> str:
    """The folder of an experiment's runs, `<paths.outputs>/<experiment>`; a sweep over experiments has its own.

    Works where only the `hydra` section is at hand (`--cfg hydra`). All jobs of a sweep see one command line, so they
    agree on the folder although each has another experiment.
    """
    given = {key: value for key, _, value in (argument.partition("=") for argument in sys.argv[1:])}
    swept = "," in given.get("experiment", "")
    experiment = "several" if swept else given.get("name") or _root_.hydra.runtime.choices.get("experiment")
    outputs = OmegaConf.select(_root_, "paths.outputs") or given.get("paths.outputs", "outputs")
    return f"{outputs}/{experiment}"


OmegaConf.register_new_resolver("leyden.help", help_text, replace=True)
OmegaConf.register_new_resolver("leyden.outputs", outputs_folder, replace=True)


def _task(cfg: DictConfig) -> Any:
    from leyden.runner import run

    hydra_config = HydraConfig.get()
    is_sweep = hydra_config.mode == RunMode.MULTIRUN
    try:
        return run(cfg, Path(hydra_config.runtime.output_dir), list(hydra_config.overrides.task))
    except USER_ERRORS as err:
        log.error("%s: %s", type(err).__name__, err)
        if is_sweep:  # the other jobs go on; the sweep ends with a non-zero exit
            raise
        drop_unused_folder(Path(hydra_config.runtime.output_dir), Path(cfg.paths.outputs).absolute())
        raise SystemExit(1) from err
    except ProcessError as err:
        if not err.is_reported:
            log.error("%s", err)
        if is_sweep:
            err.add_note(JOB_FAILED)
            raise
        raise SystemExit(1) from None
    except Interrupted as err:  # also the rest of a sweep
        raise SystemExit(err.exit_code) from None
    except KeyboardInterrupt:
        log.error("Interrupted.")
        raise SystemExit(130) from None
    except Exception as err:
        log.exception("The run failed.")
        if is_sweep:
            err.add_note(JOB_FAILED)
            raise
        raise SystemExit(1) from None


def drop_unused_folder(run_dir: Path, outputs: Path) -> None:
    """Removes the folder that Hydra made for a run that did not begin; what was wrong has been printed.

    Args:
        run_dir: stays where it holds anything of a run.
        outputs: the folder of all runs; it and what is in it go too, where they are empty then.
    """
    if {path.name for path in run_dir.iterdir()} - {".hydra", "train.log"}:
        return
    shutil.rmtree(run_dir, ignore_errors=True)
    for folder in run_dir.parents:
        if not folder.is_relative_to(outputs):
            return
        try:
            folder.rmdir()
        except OSError:  # other runs are in it
            return


def train() -> None:
    """Runs Hydra on sys.argv. Exit status: 0 done, 1 an error, 130 interrupted, 143 terminated."""
    # Hydra would print its own shortened tracebacks; with this it raises, and the message is made here.
    asked_for_tracebacks = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"
    make_local_code_importable()
    sys.argv[1:] = [empty_group(argument) for argument in sys.argv[1:]]
    place = find_place()
    try:
        if any(argument.startswith("resume=") for argument in sys.argv[1:]):
            from leyden.runs.resume import resume_arguments

            sys.argv[1:] = resume_arguments(sys.argv[1:])
        if place is not None and place.rank > 0:
            return follow(place)
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")(_task)()
    except USER_ERRORS as err:
        fail(f"{type(err).__name__}: {err}")
    except (HydraException, OmegaConfBaseException) as err:
        if asked_for_tracebacks:
            raise
        from leyden.advice import explain_composition_error

        fail(explain_composition_error(err, sys.argv[1:]))
    except OSError as err:
        if asked_for_tracebacks or JOB_FAILED in getattr(err, "__notes__", ()):
            raise
        fail(
            f"The run folder cannot be written: {err.strerror}: {err.filename}. "
            "Make it writable (permission, space), or choose another place with paths.outputs=FOLDER."
        )
    finally:
        if place is not None and place.rank == 0:
            from leyden.launch.external import publish_end

            publish_end(place)  # where there was nothing to run
        if not asked_for_tracebacks:
            del os.environ["HYDRA_FULL_ERROR"]


def follow(place: Place) -> None:
    """Takes part in a run that the first process of the same command composes."""
    from leyden.launch.external import receive
    from leyden.worker import work

    job = receive(place, sys.argv[1:])
    if job is not None:
        work(job)


def compose_config(overrides: list[str]) -> DictConfig:
    """The config of a command line, without a run.

    Raises:
        ConfigError: when it cannot be composed.
    """
    from hydra import compose, initialize_config_dir
    from omegaconf import open_dict

    from leyden.advice import explain_composition_error
    from leyden.errors import ConfigError

    make_local_code_importable()
    given = [empty_group(override) for override in overrides]
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            cfg = compose("train", given, return_hydra_config=True)
            HydraConfig.instance().set_config(cfg)
    except (HydraException, OmegaConfBaseException) as err:
        raise ConfigError(explain_composition_error(err, given).removeprefix("ConfigError: ")) from err
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def empty_group(argument: str) -> str:
    """`GROUP=null` as `GROUP=[]`, Hydra's words for no option of a group; any other argument as it is."""
    group, equals, value = argument.partition("=")
    if not equals or not any((folder / group).is_dir() for folder in conf_dirs()):
        return argument
    return f"{group}={','.join('[]' if option.strip() == 'null' else option for option in value.split(','))}"


def make_local_code_importable() -> None:
    """Lets `_target_` name modules of the current folder, also where an installed command was called."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def fail(message: str) -> None:
    """Ends the program with a message on standard error."""
    sys.stderr.write(message.rstrip() + "\n")
    raise SystemExit(1)
