"""The benchmark of modes runs each of them on the same work."""

import asyncio

from async_rl.config.sections import TrainerSection
from benchmarks.common.case import Case
from benchmarks.modes import MODES, measure_generation, measure_training, summary
from trainer.devices import choose_device
from trainer.parallel import init_parallel


def test_every_mode_trains_and_generates_the_case() -> None:
    case = Case.parse("tiny:40:2:2")
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    trained = measure_training(case, MODES, 1, parallel)
    generated = asyncio.run(measure_generation(case, MODES, 1))
    for rounds in (trained, generated):
        assert len(rounds) == 1 and len(rounds[0]) == len(MODES) and min(rounds[0]) > 0


def test_ratios_are_of_the_first_mode_to_each_other_one() -> None:
    found = summary("train.x", ["float32", "exact"], [[2.0, 4.0], [3.0, 3.0], [1.0, 4.0]])
    assert found == {"float32.train.x": 2.0, "exact.train.x": 4.0, "ratio.exact.train.x": 0.5}
