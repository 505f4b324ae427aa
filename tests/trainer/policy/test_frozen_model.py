"""A frozen model has its weights where it is used, and on the host it has none of them on the device between uses."""

from typing import Literal

import pytest
import torch

from trainer.policy.frozen_model import FrozenModel

CPU = torch.device("cpu")
Placement = Literal["device", "host"]
PLACEMENTS = pytest.mark.parametrize("placement", ["device", "host"])


def network(seed: int) -> torch.nn.Sequential:
    """It stands for a model: only its named parameters matter here."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.9), torch.nn.Linear(4, 2))


def freeze(model: torch.nn.Module, placement: Placement) -> FrozenModel:
    return FrozenModel(model, placement, CPU)  # type: ignore[arg-type]


def outputs(frozen: FrozenModel) -> torch.Tensor:
    with frozen.resident() as model:
        output: torch.Tensor = model(torch.ones(3))  # type: ignore[call-arg, arg-type]
    return output


@PLACEMENTS
def test_it_computes_what_the_model_did_every_time_and_without_gradients(placement: Placement) -> None:
    expected = network(0).eval()(torch.ones(3))
    frozen = freeze(network(0), placement)
    for _ in range(2):
        found = outputs(frozen)
        assert torch.equal(found, expected) and not found.requires_grad
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def num_resident(frozen: FrozenModel) -> int:
    """Values that have memory."""
    return sum(parameter.untyped_storage().nbytes() // 4 for parameter in frozen.parameters())


@pytest.mark.parametrize(("placement", "num_left"), [("device", 3 * 4 + 4 + 4 * 2 + 2), ("host", 0)])
def test_weights_on_the_host_take_no_memory_of_the_device_between_uses(placement: Placement, num_left: int) -> None:
    frozen = freeze(network(0), placement)
    assert num_resident(frozen) == num_left
    outputs(frozen)
    with pytest.raises(KeyError), frozen.resident():
        raise KeyError("a failure inside")
    assert num_resident(frozen) == num_left


@PLACEMENTS
def test_it_takes_over_weights_by_value(placement: Placement) -> None:
    frozen, source = freeze(network(0), placement), network(1).eval()
    expected = source(torch.ones(3))
    frozen.copy_from(source)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    assert torch.equal(outputs(frozen), expected)


@PLACEMENTS
def test_a_prefetch_changes_nothing_but_when_the_weights_come(placement: Placement) -> None:
    expected = network(0).eval()(torch.ones(3))
    frozen = freeze(network(0), placement)
    frozen.prefetch()
    frozen.prefetch()
    assert num_resident(frozen) > 0
    assert torch.equal(outputs(frozen), expected)
