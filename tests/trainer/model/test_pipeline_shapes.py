"""Pipeline stages know the shapes that they receive; the layouts' tests run them in real processes."""

from dataclasses import dataclass

import pytest
import torch
from megatron.core import parallel_state

from trainer.model.pipeline_shapes import KnownShapes, pipeline_arguments
from trainer.parallel import Parallel


@dataclass(frozen=True)
class Config:
    pipeline_model_parallel_size: int = 2
    tensor_model_parallel_size: int = 2
    context_parallel_size: int = 1
    hidden_size: int = 8
    virtual_pipeline_model_parallel_size: None = None


@pytest.mark.parametrize(
    ("tensor_parallel", "context_parallel", "first"), [(1, 1, 12), (2, 1, 6), (1, 3, 4), (2, 2, 3)]
)
def test_shapes_arrive_in_the_order_of_micro_batches_without_communication(
    tensor_parallel: int, context_parallel: int, first: int, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", None)
    config = Config(tensor_model_parallel_size=tensor_parallel, context_parallel_size=context_parallel)
    made = pipeline_arguments(config, [12, 24])  # type: ignore[arg-type]
    stages = made["p2p_communicator"]
    assert isinstance(stages, KnownShapes) and stages.pp_group is parallel_state.get_pipeline_model_parallel_group()
    sent = torch.empty(1, 1, 8)
    assert stages._communicate_shapes(sent, None, True, False) == ((first, 1, 8), None)
    assert stages._communicate_shapes(sent, None, True, True) == ((2 * first, 1, 8), (first, 1, 8))
    assert stages._communicate_shapes(sent, sent, False, False) == (None, None)
    assert stages._communicate_shapes(None, sent, False, True) == (None, (2 * first, 1, 8))


def test_without_a_pipeline_nothing_is_told() -> None:
    assert pipeline_arguments(Config(pipeline_model_parallel_size=1), [6]) == {}  # type: ignore[arg-type]
