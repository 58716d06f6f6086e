"""Final numbers: the baseline, predictions for probe inputs, and the table that ends a run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from leyden.data.datamodule import DataModule
from leyden.engine.task import Task
from leyden.sharding import is_sharded


def compute_baseline(task: Task, data: DataModule) -> tuple[str, dict[str, float]]:
    """The test metrics of a predictor that looks at no input."""
    rows = data.splits["test"]
    name, outputs = task.baseline_outputs(data, data.num_samples("test"))
    metrics = task.build_metrics()
    metrics.update(*task.metric_inputs(outputs, rows))
    return name, {key: float(value) for key, value in metrics.compute().items()}


def predict_probes(task: Task, data: DataModule) -> dict[str, float]:
    """Predictions for the data's probe inputs as `predict/<id>`."""
    probes = data.probes()
    if probes is None:
        return {}
    task.eval()
    if not is_sharded(task):  # whose processes stay where they are
        task.cpu()
    tensors = {name: tensor.to(task.device) for name, tensor in probes.tensors.items()}
    with torch.no_grad():
        columns = task.predictions(task(data.transform_batch(tensors, None)))
    return {f"predict/{name}": value for name, value in zip(probes.ids, columns["prediction"], strict=True)}


def build_table(
    results: Mapping[str, float],
    baseline: tuple[str, Mapping[str, float]] | None,
    reference: Mapping[str, Any] | None,
    order: Sequence[str] = (),
) -> str:
    """The test metrics beside the baseline and a known result, and the other final values, as text."""
    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    test = {name.removeprefix("test/"): value for name, value in results.items() if name.startswith("test/")}
    if test:
        table = Table(title="Test", title_justify="left")
        table.add_column("metric")
        table.add_column("this run", justify="right")
        if baseline:
            table.add_column(baseline[0], justify="right")
        if reference:
            table.add_column(str(reference["label"]), justify="right")
        for name in [*(name for name in order if name in test), *(name for name in test if name not in order)]:
            value = test[name]
            cells = [name, _show(value)]
            cells += [_show(baseline[1].get(name))] if baseline else []
            cells += [_show(reference.get(name))] if reference else []
            table.add_row(*cells)
        console.print(table)
    for name, value in results.items():
        if name.startswith(("predict/", "coefficient/")):
            console.print(f"{name} = {value:.4f}", highlight=False)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.rstrip()


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
