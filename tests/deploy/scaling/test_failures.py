"""What failures cost, against hand-made cases and an independent simulation in small steps of time."""

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from deploy.scaling.__main__ import main
from deploy.scaling.batches import Batches
from deploy.scaling.costs import measure
from deploy.scaling.failures import MOMENTS, failures_of
from deploy.scaling.simulation import Costs, Loss, SetUp, Shape, finish_times
from tests.deploy.scaling.test_costs import write_run
from tests.support.fresh_seed import fresh_seed

COSTS = Costs(0.01, 0.0, 0.002, 0.0, 0.1, 0.003, 0.0, 0.0)
TWO = [Shape(10, (8,)), Shape(0, (8,))]


def test_a_lost_response_goes_on_elsewhere_from_what_was_sampled_of_it() -> None:
    # At 0.05 s three of its tokens are sampled; the other instance computes 13 tokens, and then both responses go on.
    found = finish_times(TWO, COSTS, SetUp(num_instances=2), Loss(0.05, 9.0))
    assert found == pytest.approx([0.05 + 13 * 0.002 + 5 * 0.01, 0.05 + 13 * 0.002 + 3 * 0.01])


def test_the_only_instance_goes_on_itself_when_it_is_back() -> None:
    (found,) = finish_times(TWO[:1], COSTS, SetUp(), Loss(0.05, 1.0))
    assert found == pytest.approx(1.05 + 13 * 0.002 + 5 * 0.01)


def test_a_loss_after_the_rollouts_changes_nothing() -> None:
    set_up = SetUp(num_instances=2)
    assert finish_times(TWO, COSTS, set_up, Loss(0.11, 1.0)) == finish_times(TWO, COSTS, set_up)


@dataclass
class _Walker:
    """An instance as small steps of time have it: [tokens left, known tokens, group] of each response."""

    running: list[list[float]] = field(default_factory=list)
    computing_s: float = 0.0


def walked(groups: list[Shape], costs: Costs, num_instances: int, loss: Loss, step_s: float) -> list[float]:
    """When the groups finish, of instances with room for all, and a token of each response at a time."""
    instances = [_Walker() for _ in range(num_instances)]
    given = [0.0] * num_instances
    mean = sum(sum(group.response_tokens) for group in groups) / len(groups)
    for index, group in enumerate(groups):
        # As long as any, as far as is known.
        place = given.index(min(given))
        given[place] += group.prompt_tokens + mean
        instances[place].computing_s += group.prompt_tokens * costs.prompt_token_s
        for tokens in group.response_tokens:
            instances[place].running.append([tokens, group.prompt_tokens, index])
    finished, now_s = [0.0] * len(groups), 0.0
    while any(each.running for each in instances):
        if now_s >= loss.at_s and instances[0].running:
            lost, instances[0].running = instances[0].running, []
            load = [0.0] + [sum(each[0] for each in instance.running) for instance in instances[1:]]
            for left, known, index in sorted(lost):
                place = min(range(1, num_instances), key=load.__getitem__)
                load[place] += left
                total = groups[int(index)].prompt_tokens + max(groups[int(index)].response_tokens)
                instances[place].computing_s += (total - left) * costs.prompt_token_s
                instances[place].running.append([left, known, index])
        now_s += step_s
        for instance in instances:
            if instance.computing_s > 0:
                instance.computing_s -= step_s
                continue
            rate = step_s / (costs.step_s + len(instance.running) * costs.token_s) if instance.running else 0.0
            for response in instance.running:
                response[0] -= rate
                if response[0] <= 0:
                    finished[int(response[2])] = now_s
            instance.running = [each for each in instance.running if each[0] > 0]
    return finished


@pytest.mark.parametrize("seed", range(10))
def test_rollouts_with_a_loss_are_what_small_steps_of_time_give(seed: int) -> None:
    rng = random.Random(seed)
    costs = replace(COSTS, token_s=rng.uniform(0.0, 0.005))
    # One response a group: which of equal ones goes where does not matter then.
    groups = [Shape(rng.randint(1, 9), (40 + 7 * rng.randint(1, 30),)) for _ in range(rng.randint(4, 12))]
    number = rng.randint(2, 4)
    loss = Loss(rng.uniform(0.1, 1.0), 5.0)
    found = finish_times(groups, costs, SetUp(num_instances=number), loss)
    assert max(found) == pytest.approx(max(walked(groups, costs, number, loss, 0.0005)), rel=0.03)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("failures") / "run"
    write_run(path, random.Random(fresh_seed()))
    return path


def test_the_time_that_failures_cost_is_the_sum_of_both_pools(run_dir: Path) -> None:
    run = measure(run_dir)
    batches, set_up = Batches(run, None, None), replace(run.set_up, num_instances=3)
    seconds = batches.mean(set_up).seconds
    found = failures_of(run, batches, set_up, 1000 * seconds, restart_s=2 * seconds, checkpoint_every=10)
    # An instance and a replica have two devices each.
    assert (found.instances.iterations, found.training.iterations) == pytest.approx((1000 / 6, 500))
    assert found.training.cost_s == pytest.approx((2 + 10 / 2) * seconds)
    fewer_s = batches.mean(replace(set_up, num_instances=2)).seconds - seconds
    losses = [batches.with_loss(set_up, at, 2 * seconds).seconds - seconds for at in MOMENTS]
    # Of equal batches the two means differ by rounding.
    assert min(losses) > -1e-9 * seconds and fewer_s > 0
    assert found.instances.cost_s == pytest.approx(sum(losses) / len(losses) + 2 * fewer_s)
    lost = found.instances.cost_s * 6 / 1000 + found.training.cost_s * 2 / 1000
    assert found.share == pytest.approx(lost / (seconds + lost))


def test_the_command_says_what_failures_cost_and_what_turns_would_take(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(run_dir), "--devices", "16", "--mtbf-hours", "500"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "failures, of a device every 500 h: " in text and "with a checkpoint every 50 iterations" in text
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert f"{said['failures']['share']:.2%} of the time" in text
    turns = said["turns"]
    assert (turns["num_instances"], turns["num_replicas"], turns["schedule"]) == (8, 8, "synchronous")
    best = said["set_ups"][1]
    assert turns["seconds"] > 0 and f"{turns['seconds'] / best['seconds']:.2f} of periodic (both pools" in text


def test_the_devices_are_drawn_for_each_schedule(run_dir: Path, tmp_path: Path) -> None:
    assert main([str(run_dir), "--devices", "64", "-o", str(tmp_path / "devices.svg")]) == 0
    text = (tmp_path / "devices.svg").read_text()
    lines = [part.split('"')[0].split() for part in text.split('points="')[1:]]
    # 4, 8, 16, 32 and 64 devices, from left to right.
    assert len(lines) == 4
    for line in lines:
        places = [float(point.split(",")[0]) for point in line]
        assert len(places) == 5 and places == sorted(places)
    assert all(f">{name}</text>" in text for name in ("periodic", "synchronous", "one step behind", "turns", "64"))
