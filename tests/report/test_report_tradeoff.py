"""The trade-off: who dominates whom, ties within noise, circles, one recommendation in words."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evalq.records import Estimate
from evalq.report.pareto import pareto_data, pareto_figure, pareto_table
from evalq.report.tradeoff import Placed, Point, Workload, front, recommendations

MIB = 1024**2


def point(
    name: str, increase: float | None, memory: int | None, speed: float | None, status: str = "PASS", **changes: Any
) -> Point:
    """Memory in MiB; the repeats of a speed lie within 1 % of it."""
    estimate = None
    if increase is not None and name != "baseline":
        estimate = Estimate("word_perplexity_increase", increase, increase - 0.001, increase + 0.001, 0.95, 62, "t")
    fields: dict[str, Any] = {
        "name": name, "model": "m", "gpu": "g", "is_baseline": name == "baseline",
        "status": "BASELINE" if name == "baseline" else status, "releasable": status == "PASS" and name != "baseline",
        "increase": estimate, "memory_bytes": None if memory is None else memory * MIB, "speed": speed,
        "speed_low": speed and speed * 0.99, "speed_high": speed and speed * 1.01,
    }  # fmt: skip
    return Point(**{**fields, **changes})


def noise(points: list[Point], width: float = 0.002) -> Any:
    """Paired intervals: the difference of the increases, give or take `width`."""
    values = {p.name: 0.0 if p.is_baseline else p.increase.value for p in points if p.is_baseline or p.increase}

    def interval(a: str, b: str) -> tuple[float, float] | None:
        if a not in values or b not in values:
            return None
        return values[a] - values[b] - width, values[a] - values[b] + width

    return interval


def places(points: list[Point], width: float = 0.002) -> dict[str, Placed]:
    return {item.point.name: item for item in front(points, noise(points, width))}


BASELINE = point("baseline", 0.0, 100, 100.0)


def test_worse_in_all_is_dominated_and_says_by_whom() -> None:
    found = places([BASELINE, point("good", 0.005, 50, 150.0), point("bad", 0.05, 60, 120.0)])
    assert [found[name].place for name in ("baseline", "good", "bad")] == ["front", "front", "dominated"]
    assert found["bad"].by == ["good"]


def test_difference_within_noise_does_not_count() -> None:
    """b is 0.1 points better in perplexity, which the paired interval cannot tell; a needs less memory."""
    found = places([BASELINE, point("a", 0.006, 50, 150.0), point("b", 0.005, 60, 150.0)])
    assert (found["a"].place, found["b"].place, found["b"].by) == ("front", "dominated", ["a"])
    found = places([BASELINE, point("a", 0.006, 50, 150.0), point("b", 0.005, 60, 150.0)], width=0.0001)
    assert found["b"].place == "front", "told apart, b is the better one"


def test_tied_on_every_axis_are_both_kept() -> None:
    found = places([BASELINE, point("a", 0.006, 50, 150.0), point("b", 0.005, 50, 151.0)])
    assert [found[name].place for name in ("a", "b")] == ["front", "front"]
    assert (found["a"].tied, found["b"].tied) == (["b"], ["a"])


def test_repeats_that_overlap_are_as_fast() -> None:
    found = places([point("a", 0.005, 50, 100.0), point("b", 0.005, 50, 101.5), point("c", 0.005, 50, 110.0)])
    assert [found[name].place for name in "abc"] == ["dominated", "dominated", "front"]
    assert found["a"].tied == ["b"]


def test_circle_of_domination_is_kept() -> None:
    """a beats b in quality, b beats c in memory, c beats a in speed; all else is tied or unknown: none is thrown out."""
    cells = [point("a", 0.000, 50, 100.0), point("b", 0.003, 50, 102.0), point("c", 0.0015, 51, 104.5)]

    def interval(x: str, y: str) -> tuple[float, float] | None:
        return {("a", "b"): (-0.004, -0.001), ("b", "a"): (0.001, 0.004)}.get((x, y), (-0.01, 0.01))

    memory = {"a": 50 * MIB, "b": 50 * MIB, "c": 50 * MIB}
    cells = [Point(**{**vars(cell), "memory_bytes": memory[cell.name]}) for cell in cells]
    placed = {item.point.name: item.place for item in front(cells, interval)}
    assert "front" in placed.values()


axis = st.integers(0, 6)


@given(st.lists(st.tuples(axis, axis, axis), min_size=1, max_size=8), st.sampled_from([0.0001, 0.002, 0.02]))
def test_front_is_never_empty_and_dominated_cells_have_a_kept_one_above(rows: list[Any], width: float) -> None:
    cells = [point(f"c{i}", q / 500, 50 + m, 100.0 * 1.015**s) for i, (q, m, s) in enumerate(rows)]
    placed = front(cells, noise(cells, width))
    assert [item.point.name for item in placed] == [cell.name for cell in cells]
    assert any(item.place == "front" for item in placed)
    by_name = {item.point.name: item for item in placed}
    for item in placed:
        assert (item.place == "dominated") == bool(item.by)
        for name in item.tied:
            assert item.point.name in by_name[name].tied


@given(st.lists(st.tuples(axis, axis, axis), min_size=2, max_size=6, unique=True))
def test_without_noise_it_is_the_textbook_front(rows: list[Any]) -> None:
    cells = [point(f"c{i}", q / 10, 50 + m, 100.0 * 2.0**s) for i, (q, m, s) in enumerate(rows)]
    placed = front(cells, noise(cells, 0.0001))
    for i, (q, m, s) in enumerate(rows):
        beaten = any(o != (q, m, s) and o[0] <= q and o[1] <= m and o[2] >= s for o in rows)
        assert (placed[i].place == "dominated") == beaten


def test_models_and_gpus_are_not_compared_with_each_other() -> None:
    other = point("far better", -0.01, 1, 1e6, gpu="another")
    placed = front([BASELINE, other], noise([BASELINE, other]))
    assert [item.place for item in placed] == ["front", "front"]


def test_what_was_not_measured_is_not_placed() -> None:
    found = places([BASELINE, point("a", 0.005, None, None), point("b", None, 50, 100.0, "FAILED")])
    assert found["a"].reason == "memory, speed not measured"
    assert found["b"].reason == "quality not measured"
    assert {found[name].place for name in "ab"} == {"unplaced"}


def advice(*points: Point) -> Any:
    placed = front(points, noise(list(points)))
    (found,) = recommendations(placed, Workload(context=4096, concurrency=16))
    return found


def test_recommendation_says_what_the_verdict_does_not_cover() -> None:
    found = advice(BASELINE, point("fp8-kv", 0.005, 50, 100.0, caution="the longest context scored has 290 tokens"))
    assert found.text.startswith("m on g: ship fp8-kv.")
    assert found.text.endswith("But the longest context scored has 290 tokens.")


def test_recommendation_names_the_cell_its_gain_and_the_refused() -> None:
    found = advice(
        BASELINE,
        point("fast", 0.005, 50, 200.0),
        point("small", 0.008, 40, 120.0),
        point("broken", 0.3, 20, 300.0, "FAIL"),
    )
    assert found.name == "fast", "memory x speed: 2 x 2 against 2.5 x 1.2"
    assert found.text.startswith("m on g: ship fast. It is within the budget (perplexity +0.50 % [+0.40, +0.60]")
    assert "it needs 50% less memory for 16 requests of 4,096 tokens and runs at 2.00 times the speed" in found.text
    assert "Not to be shipped: broken." in found.text
    assert "small pass" in found.text


def test_tied_winner_says_so() -> None:
    found = advice(BASELINE, point("a", 0.006, 50, 150.0), point("b", 0.005, 50, 151.0))
    assert found.name in ("a", "b")
    assert "cannot be told apart from" in found.text


def test_nothing_that_passes_means_the_unquantised_model() -> None:
    found = advice(BASELINE, point("a", 0.05, 50, 200.0, "FAIL"), point("b", 0.012, 60, 150.0, "INCONCLUSIVE"))
    assert found.name == "baseline"
    assert "keep the unquantised model; no scheme passes yet. Undecided: b; more documents would tell" in found.text
    assert "no scheme passes the gate" in advice(BASELINE, point("a", 0.05, 50, 200.0, "FAIL")).text
    assert "saves neither memory nor time" in advice(BASELINE, point("a", 0.001, 101, 99.0)).text
    assert advice(point("a", 0.005, 50, 100.0)).name is None


def test_table_json_and_figure_say_the_same() -> None:
    points = [
        BASELINE,
        point("good", 0.005, 50, 150.0),
        point("bad", 0.05, 60, 120.0, "FAIL"),
        point("x", None, 1, 1.0),
    ]
    placed, workload = front(points, noise(points)), Workload()
    told = recommendations(placed, workload)
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as capture:
        console.print(pareto_table(placed, told, workload))
    text = capture.get()
    assert "dominated by good" in text
    assert "m on g: ship good." in text
    data = json.loads(json.dumps(pareto_data(placed, told, workload), allow_nan=False))
    assert [cell["place"] for cell in data["cells"]] == ["front", "front", "dominated", "unplaced"]
    figure = json.loads(json.dumps(pareto_figure(placed, workload), allow_nan=False))
    (trace,) = figure["data"]
    assert trace["text"] == ["baseline", "good", "bad"]
    assert trace["marker"]["symbol"] == ["circle", "circle", "x"]
    assert trace["y"] == [0.0, 0.5, 5.0]
    assert len(set(map(len, (trace["x"], trace["y"], trace["error_y"]["array"], trace["customdata"])))) == 1


def test_names_of_all_pairs_are_asked_once_each_way() -> None:
    asked = []
    cells = [BASELINE, point("a", 0.005, 50, 150.0), point("b", 0.006, 60, 140.0)]
    front(cells, lambda x, y: asked.append((x, y)))
    assert sorted(asked) == sorted(itertools.permutations(["baseline", "a", "b"], 2))
