from dataclasses import replace

import pytest

from async_rl.method.group_proof import GroupProof
from async_rl.method.proof.logprob_gaps import LogprobGaps
from async_rl.records.throughput import ModelSize, TrainingPool, tpspd

ROW = GroupProof(
    index=0,
    prompt_id="0",
    num_responses=2,
    num_prompt_tokens=10,
    num_response_tokens=6,
    versions=("v",),
    rewards=(0.0, 1.0),
    attempts=1,
    gaps=(("http://a", LogprobGaps(6)),),
    rollout_lengths=(2, 4),
)
MODEL = ModelSize(num_layer_parameters=1000, num_output_parameters=50, attention_width=8)
FORWARD = 2 * (1000 * 16 + 50 * 6) + 4 * 8 * (10**2 / 2 + 6 * 10 + (2**2 + 4**2) / 2)


def test_model_flops_are_three_forward_passes_and_one_for_each_frozen_copy() -> None:
    assert MODEL.forward_flops(ROW) == FORWARD
    assert TrainingPool(1, MODEL).model_flops([ROW, ROW], num_untrained=0) == 6 * FORWARD
    assert TrainingPool(1, MODEL, num_frozen=2).model_flops([ROW], num_untrained=0) == 5 * FORWARD


def test_groups_without_a_gradient_run_forward_only() -> None:
    assert TrainingPool(1, MODEL).model_flops([ROW, ROW], num_untrained=1) == (3 + 1) * FORWARD
    assert TrainingPool(1, MODEL).model_flops([ROW, ROW], num_untrained=2) == 2 * FORWARD


def test_beside_adapters_frozen_weights_take_as_much_backward_as_forward() -> None:
    pool = TrainingPool(1, replace(MODEL, num_adapter_parameters=7), num_frozen=1)
    adapters, frozen = 2 * 7 * 16, 2 * (1000 * 16 + 50 * 6)
    assert pool.model_flops([ROW], num_untrained=0) == 4 * FORWARD - frozen + 3 * adapters
    assert pool.model_flops([ROW], num_untrained=1) == 2 * FORWARD + adapters


def test_mfu_is_the_share_of_all_devices_peaks_and_null_where_a_part_is_unknown() -> None:
    pool = TrainingPool(4, MODEL, peak_flops=1e6)
    assert pool.mfu(2e6, train_s=2.0) == pytest.approx(0.25)
    assert pool.mfu(None, 2.0) is None and pool.mfu(2e6, 0.0) is None
    assert TrainingPool(4, MODEL).mfu(2e6, 2.0) is None
    assert TrainingPool(4).model_flops([ROW], 0) is None


def test_tokens_per_device_count_the_devices_of_both_pools() -> None:
    assert tpspd(600, 2.0, num_training=1, num_inference=2) == 100.0
    assert tpspd(600, 2.0, 1, None) is None and tpspd(600, 2.0, None, 2) is None and tpspd(600, 0.0, 1, 1) is None
