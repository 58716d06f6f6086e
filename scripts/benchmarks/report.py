"""Tables of results: for the terminal, and the generated block of docs/speed.md. Pure but for `write_docs`."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from benchmarks.results import ROOT, Results, Row, Verdict, build_rows, judge, title_of
from benchmarks.works import WORKS

PAGE = ROOT / "docs" / "speed.md"
RESULTS = ROOT / "docs" / "benchmarks"
BEGIN, END = "<!-- benchmarks: written by scripts/bench.py --write-docs -->", "<!-- benchmarks end -->"


def build_table(results: Results) -> Table:
    """The table of a work for the terminal."""
    startup = results.work == "startup"
    table = Table(title=WORKS[results.work].title, caption="\n".join(map(verdict_line, judge(results))))
    table.add_column("")
    for name in header(startup):
        table.add_column(name, justify="right")
    for row in build_rows(results):
        table.add_row(title_of(row), *cells(row, startup))
    return table


def header(startup: bool) -> list[str]:
    """The columns after the name: times of an epoch, ratio of CPU times, CPU time of validation."""
    if startup:
        return ["CPU s", "wall s", "ratio"]
    return ["CPU s", "wall s", "ratio", "validation"]


def cells(row: Row, startup: bool) -> list[str]:
    """The columns of a row after its name."""
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    times = [f"{row.cpu_s:.2f}", f"{row.wall_s:.2f}", ratio]
    return times if startup else [*times, f"{row.validation_cpu_s:.2f}" if row.validation_cpu_s else ""]


def verdict_line(verdict: Verdict) -> str:
    """A target, what was measured, and yes or no."""
    if verdict.value is None:
        return f"Leyden is {verdict.text}: not measured"
    return f"Leyden is {verdict.text}: {'yes' if verdict.holds else 'no'} (measured {verdict.value:.2f})"


def render_markdown(results: Results) -> str:
    """A work's section of docs/speed.md."""
    startup = results.work == "startup"
    names = ["", *header(startup)]
    lines = [
        f"### {WORKS[results.work].title}",
        "",
        f"| {' | '.join(names)} |".replace("|  |", "| |"),
        f"|---|{'---:|' * (len(names) - 1)}",
    ]
    for row in build_rows(results):
        lines.append(f"| {' | '.join([title_of(row), *cells(row, startup)])} |".replace("|  |", "| |"))
    lines += ["", *(f"- {verdict_line(verdict)}." for verdict in judge(results)), "", describe(results)]
    return "\n".join(lines)


def describe(results: Results) -> str:
    """One sentence on how, where and when it was measured."""
    how = f"{results.repeats} round{'s' if results.repeats > 1 else ''}"
    if results.work != "startup":
        how += f", {results.epochs} epoch{'s' if results.epochs > 1 else ''} each"
        num_batches = {m.num_batches for m in results.measurements if m.num_batches}
        how += f" of {', '.join(map(str, sorted(num_batches)))} batches" if num_batches else ""
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    commit = f"; commit {results.commit[:7]}{' with changes' if results.dirty else ''}" if results.commit else ""
    return f"{how}; {results.machine.cpu}, {results.machine.num_cores} cores; {versions}{commit}; {results.date}."


def load_results(folder: Path = RESULTS) -> list[Results]:
    """All results of a folder, in the order of the works."""
    paths = (folder / f"{work}.json" for work in WORKS)
    return [Results.model_validate_json(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]


def render_block(all_results: list[Results]) -> str:
    """The generated block, markers included."""
    return "\n\n".join([BEGIN, *map(render_markdown, all_results), END])


def replace_block(page: str, block: str) -> str:
    """The page with its generated block replaced.

    Raises:
        ValueError: where the page has no such block.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"The page needs one line `{BEGIN}` and one line `{END}` after it.")
    return page[: page.index(BEGIN)] + block + page[page.index(END) + len(END) :]


def write_docs() -> None:
    """Writes docs/benchmarks/*.json into docs/speed.md."""
    PAGE.write_text(replace_block(PAGE.read_text(encoding="utf-8"), render_block(load_results())), encoding="utf-8")
