"""Tensors that leave their device keep their values and their views; on a CPU, where memory leaves all the same."""

import pytest
import torch

from async_rl.shared.weights.swap import Swap, on_host


def sizes(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_values_and_views_survive_and_nothing_is_left_meanwhile() -> None:
    buffer = torch.randn(12)
    view, tied = buffer[4:10].view(2, 3), buffer.view(3, 4)
    other = torch.nn.Parameter(torch.randn(5).bfloat16())
    before = [tensor.detach().clone() for tensor in (buffer, view, tied, other)]
    swap = Swap([view, tied, buffer, other.data, torch.empty(0)])
    assert swap.num_bytes == 12 * 4 + 5 * 2 and len(swap.storages) == 2
    for _ in range(2):
        swap.to_host()
        assert swap.is_away and sizes(buffer, view, other) == [0, 0, 0]
        away = [on_host(tensor.detach()) for tensor in (buffer, view, tied, other)]
        assert all(map(torch.equal, away, before))
        swap.prefetch()
        swap.wait()
        assert not swap.is_away
        assert all(map(torch.equal, (buffer, view, tied, other), before))
        assert on_host(view) is view
    # They are still views of one memory.
    buffer.fill_(7)
    assert bool((view == 7).all())


def test_what_is_discarded_comes_back_as_it_was_copied_last() -> None:
    tensor = torch.arange(4.0)
    swap = Swap([tensor])
    swap.to_host()
    swap.prefetch()
    tensor.fill_(9)
    swap.discard()
    swap.prefetch()
    assert tensor.tolist() == [0, 1, 2, 3]
    tensor.fill_(9)
    swap.to_host()
    on_host(tensor).add_(1)
    swap.prefetch()
    assert tensor.tolist() == [10] * 4


def test_each_call_may_be_repeated() -> None:
    tensor = torch.arange(3.0)
    swap = Swap([tensor])
    swap.prefetch()
    for call in (swap.to_host, swap.to_host, swap.discard, swap.prefetch, swap.prefetch, swap.wait):
        call()
    assert tensor.tolist() == [0, 1, 2]


def test_memory_that_never_was_there_is_taken_without_values() -> None:
    tensor = torch.empty(6, dtype=torch.bfloat16)
    tensor.untyped_storage().resize_(0)
    swap = Swap([tensor])
    assert swap.is_away and swap.num_bytes == 12
    swap.prefetch()
    assert sizes(tensor) == [12]
    tensor.fill_(2)
    swap.to_host()
    swap.prefetch()
    assert tensor.tolist() == [2] * 6


def test_an_ended_swap_is_forgotten() -> None:
    tensor = torch.arange(3.0)
    swap = Swap([tensor])
    swap.to_host()
    assert on_host(tensor) is not tensor
    del swap
    assert on_host(tensor) is tensor


def test_where_there_is_no_room_for_all_what_was_taken_is_given_back() -> None:
    first, second = torch.arange(3.0), torch.arange(4.0)
    swap = Swap([first, second])
    swap.to_host()
    whole_sizes = swap._sizes
    swap._sizes = {key: size if size == 12 else 2**60 for key, size in whole_sizes.items()}
    with pytest.raises(RuntimeError):
        swap.prefetch()
    assert swap.is_away and sizes(first, second) == [0, 0]
    swap._sizes = whole_sizes
    swap.prefetch()
    assert first.tolist() == [0, 1, 2] and second.tolist() == [0, 1, 2, 3]
