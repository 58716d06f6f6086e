"""The memory plan of an experiment for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from leyden.engine.memory import STRATEGIES, StepMemory
from leyden.hardware.memory import MIB, Budget
from leyden.runs.plan import Planner, Row, Way
from leyden.runs.plan_advice import Advice, advise
from leyden.runs.plan_layout import Layout

PARTS = ("parameters", "gradients", "optimizer_state", "average", "activations", "batch", "resident")
HEADS = ("weights", "gradients", "optimiser", "average", "activations", "batch", "data")


@dataclass(frozen=True)
class MemoryPlan:
    """What `leyden plan` finds.

    Attributes:
        experiment: its name.
        accelerator: kind of device that the step was taken for, "cuda" or "cpu".
        batch_size: the global one.
        own: the config's way to take a step.
        rows: ways that were compared, each on one device.
        budget: memory of a device, if one was given or found.
        advice: where there is a budget.
        notes: what to know of the numbers.
    """

    experiment: str
    accelerator: str
    batch_size: int
    own: Way
    rows: list[Row]
    budget: Budget | None
    advice: Advice | None
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; sizes are in bytes."""
        budget, advice = self.budget, self.advice
        return {
            "experiment": self.experiment,
            "accelerator": self.accelerator,
            "batch_size": self.batch_size,
            "budget": None
            if budget is None
            else {"source": budget.source, "total_bytes": budget.total, "usable_bytes": budget.usable},
            "rows": [
                {
                    "micro_batch_size": row.way.micro_batch_size,
                    "precision": row.way.precision,
                    "activation_checkpointing": row.way.activation_checkpointing,
                    "strategy": row.way.strategy,
                    "data_parallel_size": row.layout.data_parallel_size,
                    "tensor_parallel_size": row.layout.tensor_parallel_size,
                    "is_config": row.way == self.own,
                    "fits": row.fits,
                    **{f"{part}_bytes": getattr(row.memory, part) for part in PARTS},
                    "peak_bytes": row.memory.total,
                }
                for row in self.rows
            ],
            "largest_micro_batch_size": advice.largest_micro_batch_size if advice else None,
            "overrides": advice.overrides if advice else None,
            "advice": advice.text if advice else [],
            "notes": self.notes,
        }

    def print(self, console: Console) -> None:
        """A table, and the advice."""
        console.print(self._table())
        for line in [*(self.advice.text if self.advice else []), *self.notes]:
            console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)

    def _table(self) -> Table:
        where = "CUDA device" if self.accelerator == "cuda" else "CPU"
        table = Table(
            title=f"Peak memory of a step of experiment={self.experiment} on each {where}, in MiB "
            f"(global batch {self.batch_size})",
            title_justify="left",
            box=box.SIMPLE,
            padding=0,
        )
        shown = [(p, h) for p, h in zip(PARTS, HEADS, strict=True) if any(getattr(r.memory, p) for r in self.rows)]
        recomputes = len({row.way.activation_checkpointing for row in self.rows}) > 1
        for head in ["micro-batch", "precision", *(["recompute"] if recomputes else []), "strategy"]:
            table.add_column(head, justify="right" if head == "micro-batch" else "left", overflow="fold")
        for _, head in [*shown, ("total", "peak")]:
            table.add_column(head, justify="right", overflow="fold")
        if self.budget is not None:
            table.add_column("fits", overflow="fold")
        for row in self.rows:
            way, is_own = row.way, row.way == self.own
            cells = [f"{'* ' if is_own else ''}{way.micro_batch_size}", way.precision]
            cells += [("yes" if way.activation_checkpointing else "no")] if recomputes else []
            cells += [_describe_devices(way.strategy, row.layout)]
            cells += [_number(row.memory, part) for part, _ in [*shown, ("total", "peak")]]
            if self.budget is not None:
                cells.append("[green]yes[/]" if row.fits else "[red]NO[/]")
            table.add_row(*cells, style="bold" if is_own else "")
        return table


def _describe_devices(strategy: str, layout: Layout) -> str:
    if strategy == "auto":
        return "one"
    if layout.tensor_parallel_size == 1:
        return f"{strategy} x {layout.data_parallel_size}"
    tensor = f"tp x {layout.tensor_parallel_size}"
    return f"fsdp x {layout.data_parallel_size}, {tensor}" if layout.data_parallel_size > 1 else tensor


def _number(memory: StepMemory, part: str) -> str:
    value = getattr(memory, part) / MIB
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def plan_memory(planner: Planner) -> MemoryPlan:
    """Plans the memory of an experiment's training step.

    Raises:
        PlanError: when the step cannot be planned.
    """
    advice = advise(planner) if planner.budget else None
    largest = advice.largest_micro_batch_size if advice else None
    rows = list(planner.rows([] if largest is None else [largest]))
    if advice and advice.way and advice.way not in {row.way for row in rows}:
        rows.append(planner.row(advice.way))
    return MemoryPlan(
        experiment=planner.name,
        accelerator=planner.accelerator,
        batch_size=planner.data.batch_size,
        own=planner.own,
        rows=rows,
        budget=planner.budget,
        advice=advice,
        notes=_notes(planner, rows),
    )


def _notes(planner: Planner, rows: list[Row]) -> list[str]:
    notes = ["* is the config's own way. Weights, gradients and optimiser state are exact; the rest of the peak is"]
    notes[0] += " activations. What kernels take for themselves is not counted."
    if planner.data.trims:
        notes.append("Texts are counted at their full length (data.max_length); most batches are shorter.")
    if planner.engine.compile_mode != "off":
        notes.append(f"engine.compile={planner.engine.compile_mode} is not counted; fused kernels keep less.")
    if any(row.layout.tensor_parallel_size > 1 for row in rows):
        notes.append("tp is tensor_parallel; fsdp x N, tp x M is fsdp_tensor_parallel.")
    if any(STRATEGIES[row.way.strategy].shards_weights for row in rows):
        notes.append("fsdp: the weights that a process fetches for a block, and their gradient, are with activations.")
    return notes
