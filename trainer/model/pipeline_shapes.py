"""Communication between pipeline stages that all know every micro-batch's number of rows; for `forward_backward.py`.

Megatron's own sends every shape ahead of every tensor, and waits for the device to read it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

Shape = tuple[int, int, int]


def pipeline_arguments(config: TransformerConfig, num_rows: Sequence[int]) -> dict[str, Any]:
    """Arguments of Megatron's schedule for micro-batches of these numbers of rows; none without a pipeline."""
    if config.pipeline_model_parallel_size == 1:
        return {}
    group = parallel_state.get_pipeline_model_parallel_group()
    ways = config.tensor_model_parallel_size * config.context_parallel_size
    shapes = [(rows // ways, 1, config.hidden_size) for rows in num_rows]
    of_activations = of_gradients = shapes
    if (num_chunks := config.virtual_pipeline_model_parallel_size) is not None:
        # In the schedule's order. Nothing follows the last chunk of the last stage, whose turn would be the first's;
        # nor, on the way back, the first chunk of the first stage.
        table = get_schedule_table(len(shapes), num_chunks, config.microbatch_group_size_per_vp_stage)
        of_all = [shapes[number] for number, _ in table]
        of_turns = [shapes[number] for number, chunk in table if chunk < num_chunks - 1]
        of_activations = of_turns if group.rank() == 0 else of_all
        of_gradients = of_turns if group.rank() == group.size() - 1 else of_all
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp", "embd", "pos_embd", "dp_cp"])
    communicator = KnownShapes(group, config, of_activations, of_gradients)
    return {"p2p_communicator": communicator, "pg_collection": groups}


class KnownShapes(P2PCommunicator):
    """For one run of the schedule: activations of these shapes arrive in this order, and so do gradients."""

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        config: TransformerConfig,
        of_activations: Sequence[Shape],
        of_gradients: Sequence[Shape],
    ) -> None:
        super().__init__(group, config)
        self._of_activations: Iterator[Shape] = iter(of_activations)
        self._of_gradients: Iterator[Shape] = iter(of_gradients)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        return (
            next(self._of_activations) if recv_prev else None,
            next(self._of_gradients) if recv_next else None,
        )
