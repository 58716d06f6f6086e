"""The arithmetic of results, their schema, and the tables."""

from __future__ import annotations

import io

import pytest
from pydantic import ValidationError
from rich.console import Console

from benchmarks.report import BEGIN, END, build_table, render_block, render_markdown, replace_block
from benchmarks.results import Machine, Measurement, Results, build_rows, compare, judge
from benchmarks.works import TITLES, WORKS


def make_results(work: str, times: dict[tuple[str, str], list[list[float]]]) -> Results:
    """Results of (contender, variant) -> round -> CPU seconds of each epoch; wall time is twice that."""
    measurements = [
        Measurement(
            contender=contender,
            variant=variant,
            round=number,
            epochs=[{"cpu_s": s, "wall_s": 2 * s, "validation_cpu_s": 0.5} for s in epochs],
            num_batches=430,
        )
        for (contender, variant), rounds in times.items()
        for number, epochs in enumerate(rounds)
    ]
    return Results(
        work=work,
        machine=Machine(cpu="Abacus", num_cores=2, platform="Linux"),
        versions={"torch": "2.14.1"},
        commit="0123456789",
        dirty=False,
        date="2026-12-01",
        epochs=2,
        repeats=3,
        limit_batches=None,
        measurements=measurements,
    )


MLP = make_results(
    "mlp",
    {
        # means of a round 1, 2, 4: median 2
        ("raw", "plain"): [[0.5, 1.5], [2.0, 2.0], [3.0, 5.0]],
        # 1.2, 2.6, 4.4: quotients 1.2, 1.3, 1.1 with the median 1.2, while the medians' quotient would be 1.3
        ("leyden", "plain"): [[1.2, 1.2], [2.6, 2.6], [4.4, 4.4]],
        ("keras32", "float32"): [[3.0], [3.0], [3.0]],
        ("keras32", "uint8"): [[2.6], [2.6], [2.6]],
        ("lightning", "0 workers"): [[8.0], [13.0], [27.0]],
    },
)


def test_times_are_medians_over_rounds_of_means_over_epochs() -> None:
    rows = {row.contender: row for row in build_rows(MLP)}
    assert rows["raw"].cpu_s == 2.0
    assert rows["raw"].wall_s == 4.0
    assert rows["leyden"].cpu_s == pytest.approx(2.6)
    assert rows["leyden"].validation_cpu_s == 0.5
    assert list(rows) == ["raw", "leyden", "keras32", "lightning"]


def test_ratios_are_taken_within_a_round() -> None:
    assert compare(MLP, "leyden", "raw") == pytest.approx(1.2)
    # differences 0.2, 0.6, 0.4
    assert compare(MLP, "leyden", "raw", "difference") == pytest.approx(0.4)
    assert compare(MLP, "leyden", "keras1") is None


def test_the_fastest_variant_counts() -> None:
    row = next(row for row in build_rows(MLP) if row.contender == "keras32")
    assert (row.variant, row.cpu_s) == ("uint8", 2.6)


def test_targets() -> None:
    # against Keras 1.2/2.6, 1, 4.4/2.6: the median 1 is not faster; against Lightning 0.15, 0.2, 4.4/27
    by_hand, keras, lightning = judge(MLP)
    assert (by_hand.holds, by_hand.value) == (True, pytest.approx(1.2))
    assert (keras.holds, keras.value) == (False, 1.0)
    assert (lightning.holds, lightning.value) == (True, pytest.approx(4.4 / 27))


def test_a_target_without_its_contender_is_not_judged() -> None:
    (verdict,) = judge(make_results("cnn", {("raw", "contiguous"): [[1.0]]}))
    assert verdict.holds is None
    assert "not measured" in render_markdown(make_results("cnn", {("raw", "contiguous"): [[1.0]]}))


def test_startup_is_judged_by_the_difference() -> None:
    results = make_results("startup", {("imports", "plain"): [[5.0]], ("leyden", "plain"): [[6.6]]})
    (verdict,) = judge(results)
    assert (verdict.holds, verdict.value) == (False, pytest.approx(1.6))


def test_results_survive_json_and_refuse_what_they_do_not_know() -> None:
    assert Results.model_validate_json(MLP.model_dump_json()) == MLP
    with pytest.raises(ValidationError, match="speed"):
        Results.model_validate({**MLP.model_dump(), "speed": 1})
    with pytest.raises(ValidationError, match="cpu_s"):
        Measurement(contender="raw", variant="plain", round=0, epochs=[{"cpu_s": -1.0, "wall_s": 1.0}])


def test_tables_show_times_ratio_and_verdict() -> None:
    text = render_markdown(MLP)
    assert "| Leyden | 2.60 | 5.20 | 1.20 | 0.50 |" in text
    assert "Leyden is at most 1.25 times the loop by hand: yes (measured 1.20)." in text
    assert "3 rounds, 2 epochs each of 430 batches; Abacus, 2 cores; torch 2.14.1; commit 0123456; 2026-12-01." in text
    screen = io.StringIO()
    Console(file=screen, width=100).print(build_table(MLP))
    assert "Keras, 32 steps per execution (uint8)" in screen.getvalue()


def test_block_of_the_page_is_replaced_and_nothing_else() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    block = render_block([MLP])
    assert replace_block(page, block) == f"before\n{block}\nafter\n"
    assert replace_block(replace_block(page, block), block) == replace_block(page, block)
    with pytest.raises(ValueError, match="needs one line"):
        replace_block("a page", block)


def test_every_target_and_contender_is_known() -> None:
    for work in WORKS.values():
        assert set(work.contenders) <= set(TITLES)
        for target in work.targets:
            assert {target.contender, target.against} <= set(work.contenders)
