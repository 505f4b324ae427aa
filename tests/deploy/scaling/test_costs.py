"""Costs from records that a simulation has written: they are found again, and what is no plan's run is refused."""

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import ConfigError
from deploy.scaling import costs
from deploy.scaling.__main__ import main
from deploy.scaling.batches import Batches
from deploy.scaling.costs import Measured, least_squares, line, measure
from deploy.scaling.simulation import Costs, SetUp, Shape, simulate
from tests.support.fresh_seed import fresh_seed
from tests.support.walked_iteration import walked

COSTS = Costs(0.011, 0.0004, 0.0002, 0.05, 0.03, 0.0007, 0.2, 0.4, 0.1)
SET_UP = SetUp(2, 1, 16, window_rows=1)


def write_run(
    path: Path,
    rng: random.Random,
    set_up: SetUp = SET_UP,
    num_iterations: int = 12,
    costs: Costs = COSTS,
) -> None:
    """The records of a run that takes exactly as long as a simulation; each window has one group."""
    config = {
        "run": {"placement": "separate"},
        "train": {"mode": set_up.schedule, "order": "completion"},
        "prompts": {"reserve": 0},
        "publish": {"transport": "broadcast"},
        "trainer": {
            "tensor_parallel": 2,
            "pipeline_parallel": 1,
            "context_parallel": 1,
            "micro_batch_tokens": set_up.window_rows,
        },
        "inference": {"max_concurrency": set_up.max_running},
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    with (path / "metrics.jsonl").open("w") as metrics, (path / "timeline.jsonl").open("w") as timeline:
        for iteration in range(num_iterations):
            shapes = [
                Shape(rng.randint(5, 60), tuple(sorted((rng.randint(1, 80) for _ in range(4)), reverse=True)))
                for _ in range(24)
            ]
            # The records have the longest response, and the others' mean.
            shapes = [replace(shape, response_tokens=(shape.response_tokens[0], *(20,) * 3)) for shape in shapes]
            finished, windows = walked(shapes, costs, set_up)
            trained = {index: (start_s, end_s) for index, start_s, end_s in windows}
            record = {
                "iteration": iteration,
                "seconds": costs.publish_s + windows[-1][2] + costs.optimizer_s + costs.between_s,
                "publish_s": costs.publish_s,
                "step_s": costs.optimizer_s,
                "wait_s": windows[-1][2] - sum(end_s - start_s for _, start_s, end_s in windows),
                "train_s": sum(end_s - start_s for _, start_s, end_s in windows),
                "num_instances": set_up.num_instances,
                "num_training_devices": 2 * set_up.num_replicas,
                "num_inference_devices": 2 * set_up.num_instances,
                "num_groups": len(shapes),
            }
            metrics.write(json.dumps(record) + "\n")
            for index, (shape, finished_s) in enumerate(zip(shapes, finished, strict=True)):
                row = {
                    "iteration": iteration,
                    "index": index,
                    "num_responses": 4,
                    "num_turns": 4,
                    "num_prompt_tokens": shape.prompt_tokens,
                    "num_response_tokens": sum(shape.response_tokens),
                    "longest_rollout_tokens": max(shape.response_tokens),
                    "attempts": 1,
                    "started_s": costs.publish_s + 1e-6 * index,
                    "finished_s": costs.publish_s + finished_s,
                    "train_started_s": costs.publish_s + trained[index][0],
                    "train_finished_s": costs.publish_s + trained[index][1],
                }
                timeline.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "run"
    write_run(path, random.Random(fresh_seed()))
    return path


@pytest.fixture(scope="module")
def measured(run_dir: Path) -> Measured:
    return measure(run_dir)


def test_costs_of_a_run_are_found_again(measured: Measured) -> None:
    found = measured.costs
    exact = ("window_s", "row_s", "optimizer_s", "publish_s", "between_s")
    assert [getattr(found, name) for name in exact] == pytest.approx([getattr(COSTS, name) for name in exact], rel=0.03)
    assert all(0.97 < ratio < 1.03 for ratio in measured.ratios), measured.ratios
    assert (measured.set_up, measured.devices_of) == (SET_UP, (2, 2))


def test_of_one_instance_each_cost_is_found_again(tmp_path: Path) -> None:
    """The order in which responses end does not depend on the costs; steps and tokens are nearly the same column."""
    write_run(tmp_path / "run", random.Random(fresh_seed()), replace(SET_UP, num_instances=1))
    found = measure(tmp_path / "run").costs
    assert asdict(found) == pytest.approx(asdict(COSTS), rel=0.1)


@pytest.mark.parametrize(
    "other", [SetUp(1, 1, 16, 2048), SetUp(4, 1, 16, 2048), SetUp(2, 3, 16, 2048), SetUp(2, 1, 64, 2048)]
)
def test_other_set_ups_take_what_they_would_have_taken(measured: Measured, other: SetUp) -> None:
    for iteration in measured.iterations[:3]:
        found, expected = (simulate(iteration.shapes, each, other).seconds for each in (measured.costs, COSTS))
        assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("seed", [17, 63])
def test_the_nearest_costs_of_all_are_found_and_not_those_that_are_nearer_than_their_neighbours(
    seed: int, tmp_path: Path
) -> None:
    """From a single beginning, the search ends at steps that cost nothing for one run in sixty: for these two."""
    write_run(tmp_path / "run", random.Random(seed))
    found = measure(tmp_path / "run").costs
    assert (found.step_s, found.token_s) == pytest.approx((COSTS.step_s, COSTS.token_s), rel=0.25)


def test_each_response_of_a_group_is_there_as_often_as_the_others(measured: Measured) -> None:
    """Its longest one ends the group, and so is neither left out of as many as there are, nor there more often."""
    own, same, twice = (Batches(measured, 24, number).mean(measured.set_up) for number in (None, 4, 8))
    assert same == own and twice.num_response_tokens == 2 * own.num_response_tokens


def test_runs_of_different_models_have_no_plan_in_common(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "other"]
    for path in paths:
        write_run(path, random.Random(0), SET_UP)
    with pytest.raises(ConfigError, match="is named twice"):
        measure(paths[0], paths[0])
    config = json.loads((paths[1] / "config.json").read_text())
    (paths[1] / "config.json").write_text(json.dumps(config | {"model": {"path": "other"}}))
    with pytest.raises(ConfigError, match=r"model\.path is .*, and 'other' in"):
        measure(*paths)


def test_two_runs_tell_how_much_the_pools_slow_each_other_down(tmp_path: Path) -> None:
    """One trains beside the rollouts, the other one after them."""
    costs = replace(COSTS, slower_decoding=1.5, slower_training=1.35, row_s=0.001)
    paths = [tmp_path / "periodic", tmp_path / "synchronous"]
    write_run(paths[0], random.Random(fresh_seed()), SetUp(1, 1, 16, 1), costs=costs)
    write_run(paths[1], random.Random(fresh_seed()), SetUp(1, 1, 16, 1, "synchronous"), costs=costs)
    found = measure(*paths)
    assert (found.costs.slower_decoding, found.costs.slower_training) == (1.5, 1.35)
    assert all(0.97 < ratio < 1.03 for ratio in found.ratios) and len(found.ratios) == 10
    other = SetUp(1, 1, 4, 1)
    for iteration in found.iterations:
        assert simulate(iteration.shapes, found.costs, other).seconds == pytest.approx(
            simulate(iteration.shapes, costs, other).seconds, rel=0.05
        )
    # Alone, the first says nothing of decoding.
    assert measure(paths[0]).costs.slower_decoding == 1.0


def test_what_the_records_do_not_tell_apart_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each response has the limit's length, so a step always has as many: its cost may be the step's or theirs."""
    path = tmp_path / "run"
    write_run(path, random.Random(0), SetUp(1, 1, 1000, 2048))
    rows = [json.loads(line) for line in (path / "timeline.jsonl").read_text().splitlines()]
    noise = random.Random(1)
    for row in rows:
        finished_s = COSTS.publish_s + 20 * (COSTS.step_s + 96 * COSTS.token_s) + noise.uniform(0.0, 0.02)
        row |= {
            "num_response_tokens": 80,
            "longest_rollout_tokens": 20,
            "num_prompt_tokens": 30,
            "finished_s": finished_s,
        }
    (path / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(measure(path).others) > 1
    assert output_of(capsys, path, "--instances", 4)[1].count(" s to ") >= 1


def test_a_line_is_that_of_least_squares_and_never_falls_below_zero() -> None:
    assert line([(1, 5.0), (2, 7.0), (4, 11.0)]) == pytest.approx((3.0, 2.0))
    assert line([(3, 6.0), (3, 8.0)]) == pytest.approx((0.0, 7 / 3))
    at_zero, slope = line([(1, 1.0), (2, 3.0), (3, 5.0)])
    assert at_zero == 0 and slope == pytest.approx(22 / 14)
    assert line([(1, 5.0), (2, 4.0), (3, 3.0)]) == (0.0, 2.0)


def test_factors_that_are_not_negative_are_those_of_least_squares() -> None:
    rng = random.Random(fresh_seed())
    columns = [[rng.uniform(0, 10.0**power) for _ in range(50)] for power in (-3, 0, 3, 5)]

    def total(factors: Sequence[float]) -> list[float]:
        return [sum(f * column[i] for f, column in zip(factors, columns, strict=True)) for i in range(50)]

    exact = [7.0, 0.3, 2e-4, 5e-7]
    assert least_squares(columns, total(exact))[0] == pytest.approx(exact, rel=1e-4)
    # The nearest ones have none of the second.
    found = least_squares(columns, total([7.0, -0.3, 2e-4, 5e-7]))[0]
    assert min(found) >= 0 and found[1] == 0
    assert all(sum(each) == pytest.approx(3.0) for each in least_squares([[1.0, 2.0], [1.0, 2.0]], [3.0, 6.0])[:3])
    assert least_squares([[0.0, 0.0]], [3.0, 6.0])[0] == [0.0]


def test_numbers_of_any_size_end_soon(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, run_dir, "--replicas", 10**9, "--instances", 10**9)[0] == 0
    for name in ("--prompts", "--responses"):
        code, _, said = output_of(capsys, run_dir, name, 10**9)
        assert code == 2 and "responses: expected at most 200,000; ask for fewer --prompts or --responses" in said


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(each) for each in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_shows_the_run_and_the_best_splits(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = output_of(capsys, run_dir, "--devices", 12)
    assert code == 0
    rows = [line.split() for line in text.splitlines() if line[:9].strip().isdigit()]
    assert rows[0][:3] == ["2", "1", "6"] and rows[0][-3:] == ["as", "it", "is"]
    assert len(rows) > 2 and all(int(row[2]) <= 12 for row in rows)
    seconds = [float(row[3]) for row in rows[1:]]
    assert seconds == sorted(seconds) and "taken for granted" in text
    code, text, _ = output_of(capsys, run_dir, "--instances", 4, "--prompts", 48, "--responses", 8, "--json")
    said = json.loads(text)
    now, other = said["set_ups"]
    assert (now["num_instances"], other["num_instances"], other["devices"]) == (2, 4, 10)
    assert other["seconds"] < now["seconds"] and len(said["simulated_to_measured"]) == 5


def test_another_cost_in_place_of_the_measured_one_is_what_an_iteration_then_has(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = (
        json.loads(output_of(capsys, run_dir, "--devices", 12, "--json", *costs)[1])
        for costs in ((), ("--cost", "publish_s=2.5", "--cost", "optimizer_s=0"))
    )
    costs = before["costs"]
    assert after["costs"] == costs | {"publish_s": 2.5, "optimizer_s": 0.0}
    less_s = costs["publish_s"] + costs["optimizer_s"] - 2.5
    for one, other in zip(before["set_ups"], after["set_ups"], strict=True):
        assert other["seconds"] == pytest.approx(one["seconds"] - less_s)


def test_the_best_split_of_many_devices_is_found_without_trying_all(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, _ = output_of(capsys, run_dir, "--devices", 256, "--prompts", 120, "--json")
    assert code == 0
    best = json.loads(text)["set_ups"][1]
    assert best["devices"] <= 256 and best["num_replicas"] <= 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "3"], "--devices is 3: an instance of this run has 2, a replica 2; name at least 4"),
        (["--devices", "0"], "--devices is 0: expected at least 1"),
        (["--devices", "9", "--replicas", "1"], "--devices finds the numbers of instances and replicas itself"),
        (["--prompts", "-1"], "--prompts is -1: expected at least 1"),
        (["--mtbf-hours", "0"], "--mtbf-hours is 0.0: expected a positive number"),
        (["--mtbf-hours", "nan"], "--mtbf-hours is nan: expected a positive number"),
        (["--restart-s", "inf"], "--restart-s is inf: expected a positive number"),
        (["--cost", "publish=1"], "--cost 'publish=1': expected NAME=NUMBER"),
        (["--cost", "publish_s=-1"], "--cost 'publish_s=-1': expected NAME=NUMBER"),
        (["--cost", "step_s=nan"], "the names are step_s, token_s, prompt_token_s"),
        (["--cost", "step_s=1e-320"], "--cost 'step_s=1e-320': expected NAME=NUMBER, 0 or more seconds"),
        (["--cost", "step_s=1", "--cost", "step_s=2"], "--cost 'step_s=2': step_s is 1 already: give each cost once"),
        (["--mtbf-hours", "5e-324"], "--mtbf-hours is 5e-324: expected a positive number"),
        (["--restart-s", "60"], "--restart-s is of failures: add --mtbf-hours"),
        (["--graph", "--cost", "step_s=1"], "--cost is for the records of a run, and --graph shows a config"),
        (["/nonexistent"], "'/nonexistent' is not a directory: name the run.dir of a run"),
        (["--cost", "slower_training=0.5"], "a factor of 1 or more"),
        ([f"--cost={name}=0" for name in asdict(COSTS) if name[:6] != "slower"], "leaves nothing that takes time"),
        (["-o", "x.svg"], "-o is for --graph CONFIG, or for --devices"),
        (["--devices", "8", "-o", "/dev/null/x.svg"], "cannot be written: Not a directory"),
    ],
)
def test_wrong_arguments_end_with_2_and_say_what_helps(
    arguments: list[str], message: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([str(run_dir), *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2 and message in capsys.readouterr().err


def with_rows(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Callable[[Path], None]:
    def break_it(path: Path) -> None:
        rows = [json.loads(line) for line in (path / "timeline.jsonl").read_text().splitlines()]
        (path / "timeline.jsonl").write_text("".join(json.dumps(row | change(row)) + "\n" for row in rows))

    return break_it


def with_lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    (path / "timeline.jsonl").write_text("".join(change((path / "timeline.jsonl").read_text().splitlines(True))))


def with_metrics(**changes: Any) -> Callable[[Path], None]:
    def break_it(path: Path) -> None:
        records = [json.loads(line) | changes for line in (path / "metrics.jsonl").read_text().splitlines()]
        (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    return break_it


def with_config(section: str, **changes: Any) -> Callable[[Path], None]:
    def break_it(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, section: {**config[section], **changes}}))

    return break_it


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a run in turns": (with_config("run", placement="turns"), 'run.placement is "turns"'),
    "no size": (with_config("trainer", tensor_parallel="2"), "has no config.json of a run"),
    "no config": (lambda path: (path / "config.json").unlink(), "has no config.json of a run"),
    "no records": (lambda path: (path / "metrics.jsonl").unlink(), "has 0 iterations to plan with"),
    "garbage": (lambda path: (path / "timeline.jsonl").write_text("nothing\n[]\n{}\n"), "has 0 iterations"),
    "a row twice": (lambda path: with_lines(path, lambda lines: lines + lines[::24]), "has 0 iterations"),
    "no row of a group": (
        lambda path: with_lines(path, lambda lines: [line for line in lines if '"index": 5,' not in line]),
        "has 0 iterations",
    ),
    "several turns": (with_rows(lambda row: {"num_turns": 9}), "has 0 iterations"),
    "interrupted groups": (with_rows(lambda row: {"attempts": 1 + row["index"] % 2}), "has 0 iterations"),
    "no times": (with_rows(lambda row: {"finished_s": None}), "has 0 iterations"),
    "no numbers": (with_rows(lambda row: {"num_prompt_tokens": "many"}), "has 0 iterations"),
    "impossible times": (with_metrics(seconds=1e308), "has 0 iterations"),
    "impossible numbers": (with_metrics(num_instances=1e308), "has 0 iterations"),
    "an impossible size": (with_config("trainer", pipeline_parallel=10**300), "has no config.json of a run"),
    "negative": (with_rows(lambda row: {"num_response_tokens": -5}), "has 0 iterations"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_run_to_plan_with_is_named(what: str, run_dir: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run", random.Random(0), num_iterations=6)
    break_it, message = BROKEN[what]
    break_it(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        measure(tmp_path / "run")


@pytest.mark.parametrize("evaluated", [0, 1])
def test_waiting_for_evaluations_is_no_part_of_an_iteration(evaluated: int, run_dir: Path, tmp_path: Path) -> None:
    """Every other iteration has one: all those that are fitted, or none."""
    shutil.copytree(run_dir, tmp_path / "run")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for record in records[evaluated::2]:
        record |= {"evaluation_s": 7.0, "seconds": record["seconds"] + 7.0}
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = measure(tmp_path / "run")
    assert found.costs.between_s == pytest.approx(COSTS.between_s, rel=0.03)
    assert all(0.97 < ratio < 1.03 for ratio in found.ratios), found.ratios


@pytest.mark.parametrize("number", [6, 7])
def test_an_iteration_that_waited_for_something_else_tells_nothing_of_costs(
    number: int, run_dir: Path, tmp_path: Path
) -> None:
    """As the first one after a restart, whether or not it is one of those that are fitted."""
    shutil.copytree(run_dir, tmp_path / "run")
    times = ("finished_s", "train_started_s", "train_finished_s")
    is_late = with_rows(lambda row: {name: row[name] + 60 for name in times} if row["iteration"] == number else {})
    is_late(tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("seconds", "wait_s"):
        records[number][name] += 60
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = measure(tmp_path / "run")
    assert number not in [each.record["iteration"] for each in found.iterations] and len(found.iterations) == 10
    assert all(0.97 < ratio < 1.03 for ratio in found.ratios), found.ratios


def test_odd_values_in_records_are_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field of a row, one after the other, is something else."""
    monkeypatch.setattr(costs, "NUM_ROUNDS", 1)
    write_run(tmp_path / "run", random.Random(0), num_iterations=6)
    before = (tmp_path / "run" / "timeline.jsonl").read_text()
    refused = set()
    for name in json.loads(before.splitlines()[0]):
        for value in (None, True, "x", -1, 0, 1e308, [], {}):
            (tmp_path / "run" / "timeline.jsonl").write_text(before)
            with_rows(lambda row, name=name, value=value: {name: value} if row["index"] == 3 else {})(tmp_path / "run")
            try:
                measure(tmp_path / "run")
            except ConfigError as error:
                assert "has 0 iterations to plan with" in str(error)
                refused.add(name)
    assert {"num_prompt_tokens", "num_turns", "attempts", "started_s"} <= refused and "index" not in refused


def test_groups_that_a_selection_left_out_are_sampled_and_not_trained(tmp_path: Path) -> None:
    write_run(tmp_path / "run", random.Random(0))

    def left_out(row: dict[str, Any]) -> dict[str, Any]:
        if row["index"] % 4:
            return {}
        return {"is_trained": False} | dict.fromkeys(("started_s", "finished_s", "train_started_s", "train_finished_s"))

    with_rows(left_out)(tmp_path / "run")
    with_metrics(num_groups=18)(tmp_path / "run")
    shapes = measure(tmp_path / "run").iterations[0].shapes
    assert [shape.is_trained for shape in shapes].count(False) == 6
