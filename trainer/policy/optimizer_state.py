"""Access to the master weights and Adam moments of Megatron's optimizers, in the same form for each kind.

`trainer.checkpoint.tensors` saves and fills these tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class ParameterState:
    """This rank's part of the optimizer's state for one parameter.

    All tensors are flat float32 views of the optimizer's own, and hold the elements from `start` on of the flattened
    `parameter`: writing to them changes the optimizer. `master` is the weight that steps are added to; for a float32
    parameter it is the parameter itself. `is_shard`: other replicas have the other elements.
    """

    parameter: torch.nn.Parameter
    start: int
    master: torch.Tensor
    moments: dict[str, torch.Tensor]
    is_shard: bool


def parameter_states(optimizer: MegatronOptimizer) -> Iterator[ParameterState]:
    """The state of every parameter of which this rank has a part; missing moments are created as zeros."""
    for part in _parts(optimizer):
        adam = part.optimizer
        if adam is None:  # The rank has no parameters of this kind.
            continue
        part.init_state_fn(adam, part.config)
        if isinstance(adam, torch.optim.AdamW):
            for state in adam.state.values():
                state.setdefault("step", torch.tensor(0.0))
        for parameter, start, master in _masters(part):
            moments = {name: adam.state[master][name].view(-1) for name in MOMENTS}
            yield ParameterState(
                parameter, start, master.detach().view(-1), moments, isinstance(part, DistributedOptimizer)
            )


def set_num_steps(optimizer: MegatronOptimizer, num_steps: int) -> None:
    """Sets Adam's step count, which its bias correction uses."""
    for part in _parts(optimizer):
        if part.optimizer is None:
            continue
        if isinstance(part.optimizer, torch.optim.AdamW):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(float(num_steps))
        else:
            # The fused Adams of Apex, Transformer Engine and MindSpeed count per group.
            for group in part.optimizer.param_groups:
                group["step"] = num_steps


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Megatron chains one optimizer for dense parameters and one for experts; other kinds are a single part."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _masters(part: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, torch.Tensor]]:
    """(parameter, first element, the tensor that Adam steps) of each parameter in one of Megatron's optimizers."""
    groups = part.optimizer.param_groups
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, place) in part.model_param_group_index_map.items():
            yield parameter, part._get_model_param_range_map(parameter)["param"].start, groups[group]["params"][place]
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                yield parameter, 0, master
        for parameter in (each for group in part.fp32_from_fp32_groups for each in group):
            yield parameter, 0, parameter
    else:
        assert isinstance(part, FP32Optimizer), f"unknown optimizer {type(part)}"
        for group in groups:
            for parameter in group["params"]:
                yield parameter, 0, parameter
