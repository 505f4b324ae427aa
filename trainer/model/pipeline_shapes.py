"""Communication between pipeline stages that all know every micro-batch's number of rows; for `forward_backward.py`.

Megatron's own sends every shape ahead of every tensor, and waits for the device to read it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

Shape = tuple[int, int, int]


def pipeline_arguments(config: TransformerConfig, num_rows: Sequence[int]) -> dict[str, Any]:
    """Arguments of Megatron's schedule for micro-batches of these numbers of rows; none without a pipeline."""
    if config.pipeline_model_parallel_size == 1:
        return {}
    group = parallel_state.get_pipeline_model_parallel_group()
    shapes = [(rows // config.tensor_model_parallel_size, 1, config.hidden_size) for rows in num_rows]
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp", "embd", "pos_embd", "dp_cp"])
    return {"p2p_communicator": KnownShapes(group, config, shapes), "pg_collection": groups}


class KnownShapes(P2PCommunicator):
    """For one run of the schedule: activations arrive in the order of the micro-batches, and so do their gradients."""

    def __init__(
        self, group: torch.distributed.ProcessGroup, config: TransformerConfig, shapes: Sequence[Shape]
    ) -> None:
        super().__init__(group, config)
        self._of_activations: Iterator[Shape] = iter(shapes)
        self._of_gradients: Iterator[Shape] = iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        return (
            next(self._of_activations) if recv_prev else None,
            next(self._of_gradients) if recv_next else None,
        )
