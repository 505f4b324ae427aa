"""Findings about instances, from what the recording wrote of them."""

from typing import Any

import pytest

from async_rl.records.findings import Finding
from async_rl.shared.protocol.inference import UpdateInfo
from async_rl.shared.weights.fingerprint import TensorSpec
from deploy.verify.instances import judge_canary, judge_instances, read_json
from inference_service.engine_interface import RequestRefused
from inference_service.weight_transfer.receiver import check_update

URL = "http://a"
SOUND: dict[str, Any] = {
    **{"cause": None, "detail": "", "score_sigmas": 0.3, "num_tokens": 300, "is_of_sampling": False},
    "log_temperature_error": 0.05,
}


def figures(diagnosis: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    own = {"tokens": 900, "rms": 1e-6, "mean": 0.0, "max": 1e-5, "num_bad": 0, "least_tokens": 256}
    found = {**own, "largest_rms": 4e-4, "excesses": [], "diagnosis": {**SOUND, **(diagnosis or {})}}
    return {**found, **changed}


def judged(found: dict[str, Any]) -> list[Finding]:
    return judge_instances([URL], {URL: found}, takes_first=False)


def outcomes(found: dict[str, Any]) -> list[str]:
    return [finding.outcome for finding in judged(found)]


def test_a_sound_instance_holds_in_both() -> None:
    assert outcomes(figures()) == ["holds", "holds"]


def test_an_instance_that_sampled_nothing_or_too_little_is_not_tested() -> None:
    assert [finding.outcome for finding in judge_instances([URL], {}, takes_first=False)] == ["not tested"] * 2
    few = {"score_sigmas": None, "detail": "9 tokens, of 256 that are needed"}
    assert outcomes(figures(few, tokens=9)) == ["not tested"] * 2
    assert outcomes(figures(few)) == ["holds", "not tested"], "all iterations together have enough"
    assert outcomes(figures(diagnosis=None) | {"diagnosis": None}) == ["holds", "not tested"]


def test_sampling_is_tested_only_by_tokens_that_would_show_twice_the_temperature() -> None:
    assert "1.3 times as high or low" in judged(figures({"log_temperature_error": 0.05}))[1].bound
    for error in (None, 0.12):
        assert outcomes(figures({"log_temperature_error": error})) == ["holds", "not tested"]
    wrong = {"cause": "temperature", "is_of_sampling": True, "score_sigmas": 9.0, "log_temperature_error": 0.5}
    assert outcomes(figures(wrong)) == ["holds", "fails"]


def test_sampling_is_not_judged_by_the_groups_that_finish_first() -> None:
    wrong = figures({"cause": "temperature", "is_of_sampling": True, "score_sigmas": 9.0})
    findings = judge_instances([URL], {URL: wrong}, takes_first=True)
    assert [finding.outcome for finding in findings] == ["holds", "not tested"]


@pytest.mark.parametrize(
    ("cause", "named"),
    [
        ("temperature", "wrong temperature"),
        ("head", "stale head"),
        ("dtype", "other dtype"),
        ("rounding", "other rounding"),
        ("weights", "other weights"),
    ],
)
def test_wrong_log_probs_are_named_and_sampling_is_not_judged_by_them(cause: str, named: str) -> None:
    first, second = judged(figures({"cause": cause, "detail": "why"}, excesses=["too large"]))
    assert (first.outcome, first.cause) == ("fails", named)
    assert second.outcome == "not tested" and named in second.shown


def test_tokens_drawn_otherwise_than_reported_fail_in_sampling_only() -> None:
    first, second = judged(figures({"cause": "temperature", "is_of_sampling": True, "score_sigmas": -11.0}))
    assert first.outcome == "holds"
    assert (second.outcome, second.cause) == ("fails", "wrong temperature")


def test_excesses_and_log_probs_that_are_no_numbers_fail_without_a_diagnosis() -> None:
    assert judged(figures(excesses=["RMS 1"]) | {"diagnosis": None})[0].cause == "other weights"
    assert "3 log-probs are no finite numbers" in judged(figures(num_bad=3))[0].shown


def test_exact_mode_allows_no_difference() -> None:
    assert judged(figures(largest_rms=0.0))[0].bound == "no difference (train.exact)"


def test_a_canary_that_every_instance_passed_holds() -> None:
    (finding,) = judge_canary([URL], {}, {})
    assert finding.outcome == "holds"


def test_a_stale_copy_that_the_canary_saw_is_named_by_its_class() -> None:
    why = "received the weights, but computes with a stale copy of {}: its log-probs are 0.1 nats"
    stale = [judge_canary([URL], {URL: why.format(name)}, {})[0].cause for name in ("head", "q norm")]
    assert stale == ["stale head", "stale q norm"]


def test_an_instance_that_refuses_tensors_of_another_dtype_is_named() -> None:
    """With the reason that the service itself gives."""
    update = UpdateInfo(names=["w"], dtype_names=["float32"], shapes=[[2]])
    with pytest.raises(RequestRefused) as refused:
        check_update(update, {"w": TensorSpec("w", "bfloat16", (2,))})
    (finding,) = judge_canary([URL], {URL: str(refused.value)}, {})
    assert (finding.outcome, finding.cause) == ("fails", "other dtype")


def test_what_the_canary_said_of_adapters_is_the_cause() -> None:
    why = "received the adapters, but computes with all but those of model.layers.0: its log-probs are 0.1 nats"
    assert judge_canary([URL], {URL: why}, {})[0].cause == "adapters: all but those of model.layers.0"


def test_what_log_probs_say_of_an_instance_explains_an_unclear_canary() -> None:
    unclear = {URL: "does not clearly compute with the weights it was sent"}
    found = {URL: figures({"cause": "temperature"})}
    assert judge_canary([URL], unclear, found)[0].cause == "wrong temperature"
    assert judge_canary([URL], unclear, {})[0].cause == "other weights"
    wrong = {URL: "received the weights, but computes with wrong ones of expert up and expert down: its log-probs"}
    assert judge_canary([URL], wrong, found)[0].cause == "wrong temperature"
    assert judge_canary([URL], wrong, {})[0].cause == "wrong expert up and expert down"


def test_files_that_were_not_written_have_nothing(tmp_path: Any) -> None:
    assert read_json(tmp_path / "instances.json") == {}
