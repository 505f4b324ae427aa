"""The steps of a batch as one record."""

import math

from async_rl.method.step_stats import StepStats


def step(loss: float = 1.0, *, skipped: bool = False, **metrics: float) -> StepStats:
    return StepStats(loss, 2.0, 1e-3, metrics, num_untrained=1, skipped=skipped)


def test_figures_are_means_over_the_steps_that_were_taken() -> None:
    mean = StepStats.mean([step(1.0, kl=0.5), step(math.inf, skipped=True, kl=math.nan), step(2.0, kl=1.0)])
    assert (mean.loss, mean.metrics, mean.num_untrained, mean.skipped) == (1.5, {"kl": 0.75}, 3, False)


def test_a_metric_that_only_some_steps_have_is_the_mean_of_those() -> None:
    assert StepStats.mean([step(a=1.0), step(a=2.0, b=4.0), step(b=6.0)]).metrics == {"a": 1.5, "b": 5.0}


def test_steps_that_were_all_skipped_have_figures_whatever_their_losses() -> None:
    for losses in ((math.inf, -math.inf), (math.nan, 1.0), (1e308, 1e308)):
        mean = StepStats.mean([step(loss, skipped=True) for loss in losses])
        assert mean.skipped and not math.isfinite(mean.loss) and mean.grad_norm == 2.0
