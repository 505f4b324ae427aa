"""The rule of accepted layouts: what cannot be divided is refused by the name of the key, with the remedy."""

from dataclasses import replace
from typing import Any

import pytest

from async_rl.checks.preflight.layout import require_layout
from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError
from async_rl.shared.model_parts import DeltaNet, Experts
from async_rl.shared.model_shape import ModelShape

DENSE = ModelShape("qwen3", 2, 32, 64, 4, 2, 8, 96, 1e-6, 1e4, None, tied=False)
EXPERTS = replace(DENSE, num_heads=8, num_kv_heads=8, experts=Experts(4, 2, 64, renormalized=True))


def test_what_divides_the_model_is_accepted() -> None:
    require_layout(TrainerSection(), DENSE, 1)
    require_layout(TrainerSection(), DENSE, 5)
    layout = {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 4}
    require_layout(TrainerSection(**layout), EXPERTS, 8)
    require_layout(TrainerSection(tensor_parallel=2, context_parallel=4), EXPERTS, 8)
    require_layout(TrainerSection(context_parallel=4), DENSE, 4)
    require_layout(TrainerSection(tensor_parallel=4, pipeline_parallel=2), replace(DENSE, num_layers=3), 8)
    interleaved = TrainerSection(pipeline_parallel=2, virtual_pipeline_parallel=3)
    for num_layers in (6, 7, 8):
        require_layout(interleaved, replace(DENSE, num_layers=num_layers), 4)


def test_experts_have_feed_forward_parts_of_their_own_that_nothing_divides() -> None:
    odd = replace(EXPERTS, ffn_size=63)
    require_layout(TrainerSection(tensor_parallel=2), odd, 2)


@pytest.mark.parametrize(
    ("model", "num_ranks", "layout", "message"),
    [
        (DENSE, 8, {"tensor_parallel": 8}, "tensor_parallel = 8 does not divide the model's 4 attention heads"),
        (
            replace(DENSE, num_heads=12, num_kv_heads=6),
            4,
            {"tensor_parallel": 4},
            "tensor_parallel = 4 is neither a divisor nor a multiple of the model's 6 key / value heads",
        ),
        (
            replace(DENSE, num_heads=12, num_kv_heads=4, head_dim=4, ffn_size=144, vocab_size=144),
            12,
            {"tensor_parallel": 12},
            "tensor_parallel = 12 does not divide the model's 32 rows of keys and values",
        ),
        (DENSE, 3, {"context_parallel": 3}, "trainer.context_parallel = 3 does not divide the 4 attention heads: its"),
        (
            DENSE,
            8,
            {"tensor_parallel": 2, "context_parallel": 4},
            "context_parallel = 4 does not divide the 2 attention heads of each of trainer.tensor_parallel = 2 ranks: "
            "its ranks exchange rows for heads; choose a divisor of 2",
        ),
        (
            replace(DENSE, num_heads=12, num_kv_heads=6),
            4,
            {"context_parallel": 4},
            "trainer.context_parallel = 4 is neither a divisor nor a multiple of the 6 key / value heads: its ranks",
        ),
        (DENSE, 3, {"pipeline_parallel": 3}, "pipeline_parallel is 3, more than the model's 2 layers: set 2 at most"),
        (
            replace(DENSE, num_layers=5),
            2,
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 3},
            "virtual_pipeline_parallel is 3: with trainer.pipeline_parallel = 2 these are 6 parts, more than the "
            "model's 5 layers: set 2 at most",
        ),
        (
            DENSE,
            2,
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
            "these are 4 parts, more than the model's 2 layers: leave it at 1",
        ),
        (
            DENSE,
            2,
            {"virtual_pipeline_parallel": 2},
            "virtual_pipeline_parallel is 2, but trainer.pipeline_parallel is 1: ranks of a pipeline take turns with "
            "their parts; leave it at 1, or set more stages",
        ),
        (EXPERTS, 3, {"expert_parallel": 3}, "expert_parallel = 3 does not divide the model's 4 experts"),
        (
            replace(DENSE, vocab_size=97),
            2,
            {"tensor_parallel": 2},
            "tensor_parallel = 2 does not divide the model's 97 vocabulary entries: choose a divisor of 97",
        ),
        (
            replace(DENSE, ffn_size=63),
            2,
            {"tensor_parallel": 2},
            "tensor_parallel = 2 does not divide the model's 63 feed-forward size",
        ),
        (
            replace(DENSE, delta=DeltaNet(3, 6, 8, 8, 4, frozenset({0}))),
            2,
            {"tensor_parallel": 2},
            "tensor_parallel = 2 does not divide the model's 3 key heads of linear attention (linear_num_key_heads)",
        ),
        (
            replace(DENSE, experts=Experts(4, 2, 64, True, shared_size=21, gates_shared=True)),
            2,
            {"tensor_parallel": 2},
            "tensor_parallel = 2 does not divide the model's 21 shared experts' feed-forward size",
        ),
        (DENSE, 2, {"expert_parallel": 2}, "expert_parallel is 2, but the model has no experts: leave it at 1"),
        (DENSE, 3, {"tensor_parallel": 2}, "3 training ranks (trainer.num_processes) cannot form replicas"),
        (EXPERTS, 3, {"expert_parallel": 2}, "expert_parallel = 2 does not divide the 3 ranks of a pipeline stage"),
    ],
)
def test_everything_else_is_refused_by_name(
    model: ModelShape, num_ranks: int, layout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        require_layout(TrainerSection(**layout), model, num_ranks)
    assert message in str(refused.value)
