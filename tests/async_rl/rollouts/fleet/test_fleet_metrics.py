from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from async_rl.rollouts.fleet.metrics import FleetMetrics
from async_rl.rollouts.pool.inference_pool import InferencePool

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"

RECORD = {
    "iteration": 7,
    "idle_training": 0.25,
    "idle_inference": 0.5,
    "desired_instances": 3,
    "num_continued": 4,
    "num_resampled": 1,
    "reward_mean": 0.5,
}


def scrape(metrics: FleetMetrics) -> dict[tuple[str, str], float]:
    """Samples by name and instance; of the states only those that hold."""
    return {
        (sample.name, sample.labels.get("state") or sample.labels.get("instance", "")): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if "state" not in sample.labels or sample.value
    }


def metrics_of(pool: InferencePool) -> FleetMetrics:
    return FleetMetrics(lambda: pool.members)


def test_every_instance_has_its_figures(make_pool) -> None:
    pool = make_pool(A)
    member = pool.members[0]
    member.outstanding_tokens = 120
    member.num_tokens, member.num_failures, member.tokens_per_s = 5000, 2, 12.5
    assert scrape(metrics_of(pool)) == {
        ("async_rl_instance_state", "joining"): 1,
        ("async_rl_instance_outstanding_tokens", member.name): 120,
        ("async_rl_instance_requests_running", member.name): 0,
        ("async_rl_instance_tokens_per_second", member.name): 12.5,
        ("async_rl_instance_tokens_total", member.name): 5000,
        ("async_rl_instance_failures_total", member.name): 2,
        ("async_rl_weight_publishes_total", ""): 0,
    }


def test_exactly_one_state_of_an_instance_holds(make_pool) -> None:
    pool = make_pool(A)
    metrics = metrics_of(pool)
    (member,) = pool.members
    happen: dict[str, Callable[[], object]] = {
        "stale": lambda: pool.note_failure(member, "it said v0"),
        "dead": lambda: pool.note_lost(member, "silent"),
        "draining": lambda: pool.drain(A),
    }
    for state, event in happen.items():
        event()
        lines = [line for line in metrics.render().decode().splitlines() if line.startswith("async_rl_instance_state{")]
        (holds,) = (line for line in lines if line.endswith(" 1.0"))
        assert len(lines) == 5 and f'state="{state}"' in holds


def test_instances_come_and_go_with_the_pool(make_pool) -> None:
    pool = make_pool(A)
    metrics = metrics_of(pool)
    pool.add(B, "late")
    assert ("async_rl_instance_tokens_total", "late") in scrape(metrics)
    pool.remove("late")
    assert ("async_rl_instance_tokens_total", "late") not in scrape(metrics)


def test_a_record_sets_the_gauges_of_the_run(make_pool) -> None:
    metrics = metrics_of(make_pool(A))
    assert metrics.desired_instances is None
    metrics.record_iteration(RECORD | {"iteration": 6, "desired_instances": 9})
    metrics.record_iteration(RECORD)
    assert metrics.desired_instances == 3
    samples = scrape(metrics)
    assert {name: value for (name, label), value in samples.items() if not label} == {
        "async_rl_iteration": 7,
        "async_rl_idle_training": 0.25,
        "async_rl_idle_inference": 0.5,
        "async_rl_desired_instances": 3,
        "async_rl_reward_mean": 0.5,
        "async_rl_responses_continued": 4,
        "async_rl_responses_resampled": 1,
        "async_rl_weight_publishes_total": 2,
    }


def test_the_endpoint_shows_the_figures_of_the_last_record(make_pool, serve) -> None:
    endpoint = serve(make_pool(A))
    endpoint.server.metrics.record_iteration(RECORD)
    assert "\nasync_rl_desired_instances 3.0\n" in endpoint.ask("/metrics")[1]
    assert endpoint.ask("/fleet")[1]["desired_instances"] == 3
