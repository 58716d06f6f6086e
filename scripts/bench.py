"""Measures Leyden beside a PyTorch loop by hand, Keras and plain Lightning. See docs/speed.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.processes import (
    MeasurementError,
    Options,
    describe_turn,
    measure,
    needs_arrays,
    plan_turns,
    write_arrays,
)
from benchmarks.report import RESULTS, build_table, write_docs
from benchmarks.results import (
    Measurement,
    Results,
    describe_code,
    describe_machine,
    installed_versions,
    today,
)
from benchmarks.works import TITLES, WORKS

console = Console()
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def run_work(work: str, options: Options) -> Results:
    """Measures a work: every contender in a process of its own, in turns."""
    turns = plan_turns(work, options)
    commit, dirty = describe_code()
    versions = installed_versions()
    measurements = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        arrays = Path(folder) / "arrays.npz"
        if needs_arrays(turns):
            write_arrays(work, options, arrays)
        bar = progress.add_task(work, total=len(turns))
        for turn in turns:
            progress.update(bar, description=f"{work}, round {turn.round + 1}: {describe_turn(turn)}")
            found = measure(work, turn, options, arrays)
            versions |= found.pop("versions", {})
            measurements.append(Measurement(contender=turn.contender, variant=turn.variant, round=turn.round, **found))
            progress.advance(bar)
    return Results(
        work=work,
        machine=describe_machine(),
        versions=versions,
        commit=commit,
        dirty=dirty,
        date=today(),
        epochs=1 if work == "startup" else options.epochs,
        repeats=options.repeats,
        limit_batches=options.limit_batches,
        overrides=list(options.overrides),
        measurements=measurements,
    )


@app.command()
def main(
    works: Annotated[
        list[str] | None, typer.Argument(metavar="[WORK]...", help=f"Of {', '.join(WORKS)}; none names all.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs that count in each process, after one of warm-up; 2, nlp 10.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; every contender has its turn in each.")] = 3,
    contenders: Annotated[str | None, typer.Option(help=f"Some of {','.join(TITLES)}; all by default.")] = None,
    limit_batches: Annotated[int | None, typer.Option(min=1, help="Batches of an epoch, for a quick try.")] = None,
    keras_python: Annotated[str, typer.Option(help="An interpreter with keras and tensorflow-cpu.")] = sys.executable,
    data_dir: Annotated[str, typer.Option(help="Folder of downloaded data sets.")] = "data",
    override: Annotated[list[str] | None, typer.Option(help="A further override of the experiment.")] = None,
    results_dir: Annotated[Path, typer.Option(help="Folder for WORK.json.")] = RESULTS,
    profile: Annotated[bool, typer.Option("--profile", help="Say where Leyden's time goes; writes no result.")] = False,
    write_page: Annotated[
        bool, typer.Option("--write-docs", help="Write the results into docs/speed.md; without a WORK, do only that.")
    ] = False,
) -> None:
    """Measures Leyden beside a PyTorch loop by hand, Keras and plain Lightning; see docs/speed.md.

    Each measurement is a process of its own on one thread; CPU time decides.

    **Examples:**

    - all: `python scripts/bench.py --keras-python keras/bin/python`

    - one work, quickly: `python scripts/bench.py nlp --repeats 1 --contenders raw,leyden`

    - where the time goes: `python scripts/bench.py mlp --profile`

    - the page, from the results that are there: `python scripts/bench.py --write-docs`
    """
    chosen = works or ([] if write_page else list(WORKS))
    unknown = sorted(set(chosen) - set(WORKS))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(WORKS)}.")
    names = None if contenders is None else tuple(name.strip() for name in contenders.split(","))
    unknown = sorted(set(names or ()) - set(TITLES))
    if unknown:
        raise typer.BadParameter(f"--contenders {', '.join(unknown)}: choose from {', '.join(TITLES)}.")
    try:
        for work in chosen:
            number = epochs or WORKS[work].epochs
            options = Options(number, repeats, names, limit_batches, keras_python, tuple(override or ()), data_dir)
            if profile:
                if work != "startup":
                    from benchmarks.profiling import profile as run_profile

                    typer.echo(run_profile(work, options))
                continue
            results = run_work(work, options)
            results_dir.mkdir(parents=True, exist_ok=True)
            path = results_dir / f"{work}.json"
            path.write_text(results.model_dump_json(indent=2) + "\n", encoding="utf-8")
            console.print(build_table(results))
            console.print(f"Written to {path}")
    except MeasurementError as err:
        console.print(str(err), markup=False, style="red")
        raise typer.Exit(1) from err
    if write_page:
        write_docs()


if __name__ == "__main__":
    app()
