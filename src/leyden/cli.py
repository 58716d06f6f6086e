"""The `leyden` command: thin sub-commands, each calls one function elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from leyden.errors import USER_ERRORS

app = typer.Typer(
    help="Trains experiments, and evaluates and predicts with what they trained.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

if TYPE_CHECKING:
    from leyden.runs.plan_table import MemoryPlan
    from leyden.runs.prove_devices import DeviceProof
    from leyden.runs.prove_order import OrderProof

T = TypeVar("T")
WIDTH = 118  # of a wide table that goes to a file
Run = Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")]


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="Train and test an experiment; the same as `python train.py`. `leyden train --help` lists experiments.",
)
def train(context: typer.Context) -> None:
    """Hands the arguments to Hydra as they are."""
    from leyden.entry import train as run_training

    sys.argv = ["leyden train", *context.args]
    run_training()


@app.command(
    help="Compute the metrics of a run again.\n\nExample: leyden evaluate outputs/vision/2026-01-31_12-00-00-000000"
)
def evaluate(
    run: Run,
    split: Annotated[Literal["train", "val", "test"], typer.Option(help="Which rows.")] = "test",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows at a time; default: as in training.")] = None,
) -> None:
    """Prints one metric a line."""
    from leyden.entry import make_local_code_importable
    from leyden.runs.evaluate import evaluate_run

    make_local_code_importable()
    for name, value in _report_errors(lambda: evaluate_run(run, split, batch_size)).items():
        typer.echo(f"{name} = {value:.6g}")


@app.command(
    help="Predict for the rows of a table, a picture, or a folder of pictures.\n\n"
    "Example: leyden predict outputs/regression/2026-01-31_12-00-00-000000 new_cars.csv --output predictions.csv"
)
def predict(
    run: Run,
    inputs: Annotated[Path, typer.Argument(help="CSV, TSV, JSON lines, Parquet; a picture or a folder of them.")],
    output: Annotated[Path | None, typer.Option(help="Write .csv, .jsonl or .parquet; default: print CSV.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 256,
) -> None:
    """Prints or writes one row per input."""
    from leyden.entry import make_local_code_importable
    from leyden.runs.predict import predict_file, write_table

    make_local_code_importable()
    frame = _report_errors(lambda: predict_file(run, inputs, batch_size))
    if output is None:
        typer.echo(frame.write_csv(), nl=False)
    else:
        _report_errors(lambda: write_table(frame, output))
        typer.echo(f"{len(frame)} predictions written to {output}")


@app.command(
    help="Show what hardware is here, and measure how fast it is.\n\n"
    "Multiplications beside the card's peak, copies, launch latency, and the training step of experiment=vision on the "
    "CPU and each accelerator. Half a minute; the machine should be idle. What is not known is null.\n\n"
    "Example: leyden doctor --json > machine.json"
)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prints tables or JSON to standard output, and what it measures to standard error."""
    import json

    from rich.console import Console

    from leyden.entry import compose_config
    from leyden.runs.doctor import Diagnosis, diagnose

    progress = Console(stderr=True)

    def run() -> Diagnosis:
        cfg = compose_config(["experiment=vision", "logger=null", "test=false"])
        if not progress.is_terminal:
            return diagnose(cfg, lambda what: progress.print(f"Measuring {what} ...", soft_wrap=True))
        with progress.status("Looking at this machine ...") as status:
            return diagnose(cfg, lambda what: status.update(f"Measuring {what} ..."))

    diagnosis = _report_errors(run)
    if as_json:
        typer.echo(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        diagnosis.print(Console())


EXPERIMENT = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(
    context_settings=EXPERIMENT,
    help="Plan the memory of an experiment's training step, before there is a device.\n\n"
    "Takes the step on tensors that have shapes but no memory, in seconds and without a GPU or the data set, and shows "
    "its peak for other micro-batches, number formats, recomputed activations and strategies. With a budget: what "
    "fits, the largest micro-batch, and the override to type.\n\n"
    "Example: leyden plan experiment=vision_cifar10 data.batch_size=4096 --budget 24GiB",
)
def plan(
    context: typer.Context,
    budget: Annotated[
        str | None,
        typer.Option(
            help='Memory of a device (24GiB, 80 GB) or a card ("NVIDIA H200"); default: the GPU here, if any.'
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prints a table or JSON to standard output, and what it does to a terminal's standard error."""
    import json

    from rich.console import Console

    progress = Console(stderr=True)

    def run() -> MemoryPlan:
        with progress.status("Starting ...") as status:  # shows nothing where there is no terminal
            from leyden.entry import compose_config
            from leyden.runs.plan import build_planner
            from leyden.runs.plan_table import plan_memory

            cfg = compose_config([*context.args, "logger=null"])
            planner = build_planner(cfg, context.args, budget, lambda what: status.update(f"Planning: {what} ..."))
            return plan_memory(planner)

    found = _report_errors(run)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        console = Console()
        found.print(console if console.is_terminal else Console(width=WIDTH))


prove = typer.Typer(help="Prove a promise on your own experiment.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(prove, name="prove")


@prove.command(
    context_settings=EXPERIMENT,
    help="Prove that a killed and resumed run ends as one that was not, to the last bit.\n\n"
    "Trains the experiment straight through, and once more killed by SIGKILL before random steps and resumed; exit 0 "
    "only if weights, losses, samples, metrics.json and history.csv are all equal.\n\n"
    "Example: leyden prove resume experiment=vision trainer.max_epochs=3 --kills 3",
)
def resume(
    context: typer.Context,
    kills: Annotated[int, typer.Option(min=1, help="How often the run is killed.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of the choice of steps; default: another each time.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep the two runs here; default: a temporary folder.")] = None,
) -> None:
    """Prints a table of what differs."""
    from tempfile import TemporaryDirectory

    from rich.console import Console

    from leyden.runs.prove_resume import prove_resume

    with TemporaryDirectory(prefix="leyden-prove-") as temporary:
        if folder is not None and folder.exists() and any(folder.iterdir()):
            raise typer.BadParameter(f"{folder} is not empty.", param_hint="--folder")
        place = (folder or Path(temporary)).absolute()
        proof = _report_errors(lambda: prove_resume(context.args, kills, place, seed))
    Console().print(proof.table())
    raise typer.Exit(0 if proof.is_exact else 1)


@prove.command(
    context_settings=EXPERIMENT,
    help="Prove that each sample is taken exactly once an epoch, in the same order and with the same values, for any "
    "number of processes and wherever the data stays.\n\n"
    "Example: leyden prove order experiment=vision --ranks 1,2,3 --residencies host,mmap,workers",
)
def order(
    context: typer.Context,
    ranks: Annotated[str, typer.Option(help="Numbers of processes, e.g. 1,2,3.")] = "1,2,3",
    residencies: Annotated[
        str | None, typer.Option(help="Of device, host, mmap, workers; default: all, or workers for a Dataset.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs are read in each way.")] = 2,
) -> None:
    """Prints a table of all ways."""
    from rich.console import Console

    def run() -> OrderProof:
        from leyden.entry import compose_config
        from leyden.runs.prove_order import load_data, parse_kinds, parse_ranks, prove_order

        counts, kinds = parse_ranks(ranks), parse_kinds(residencies)
        overrides = [*context.args, "test=false"]
        return prove_order(load_data(compose_config(overrides), overrides), counts, kinds, epochs)

    proof = _report_errors(run)
    Console().print(proof.table())
    raise typer.Exit(0 if proof.all_exact else 1)


@prove.command(
    context_settings=EXPERIMENT,
    help="Prove that an experiment gives the same result for any number of processes and any way to share the work.\n\n"
    "Trains some steps in one process and in the other ways (processes on this machine's CPU), and compares losses, "
    "weights, metrics and the order of samples; exit 0 only if all agree within 1e-5. In float64, where nothing but a "
    "true difference grows so large (engine.precision=32 takes another); without augmentation and dropout, which each "
    "process draws. Also prints what each process holds and sends.\n\n"
    "Example: leyden prove devices experiment=vision --strategies ddp_cpu --devices 1,2,3",
)
def devices(
    context: typer.Context,
    strategies: Annotated[
        str, typer.Option(help="Of ddp_cpu, fsdp_cpu, tensor_parallel_cpu, with commas.")
    ] = "ddp_cpu",
    devices: Annotated[str, typer.Option(help="Numbers of processes, e.g. 1,2,3.")] = "1,2",
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each run.")] = 20,
    folder: Annotated[Path | None, typer.Option(help="Keep the runs here; default: a temporary folder.")] = None,
) -> None:
    """Prints a table of all ways."""
    from tempfile import TemporaryDirectory

    from rich.console import Console

    def run(place: Path) -> DeviceProof:
        from leyden.entry import compose_config
        from leyden.runs.prove_devices import prove_devices
        from leyden.runs.prove_order import parse_ranks

        names = [name.strip() for name in strategies.split(",") if name.strip()]
        return prove_devices(
            context.args, compose_config(context.args), names, parse_ranks(devices, "--devices"), steps, place
        )

    with TemporaryDirectory(prefix="leyden-prove-") as temporary:
        if folder is not None and folder.exists() and any(folder.iterdir()):
            raise typer.BadParameter(f"{folder} is not empty.", param_hint="--folder")
        place = (folder or Path(temporary)).absolute()
        proof = _report_errors(lambda: run(place))
    Console().print(proof.table())
    for name, reason in proof.refused.items():
        typer.echo(f"{name}: {reason}")
    raise typer.Exit(0 if proof.all_equal else 1)


def _report_errors(action: Callable[[], T]) -> T:
    try:
        return action()
    except USER_ERRORS as err:
        typer.echo(f"{type(err).__name__}: {err}", err=True)
        raise typer.Exit(1) from err


if __name__ == "__main__":
    app()
