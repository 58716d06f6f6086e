"""docs/speed.md shows what docs/benchmarks/*.json say."""

from __future__ import annotations

from benchmarks.report import PAGE, RESULTS, load_results, render_block, replace_block
from benchmarks.works import WORKS


def test_page_shows_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert replace_block(page, render_block(load_results())) == page, "run: python scripts/bench.py --write-docs"


def test_every_result_is_of_a_known_work() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} <= set(WORKS)
    assert all(results.limit_batches is None for results in load_results())
