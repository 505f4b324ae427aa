"""Products of exact mode: the same bits for an element, whatever is computed beside it, on any number of threads."""

from collections.abc import Iterator

import pytest
import torch

from async_rl.shared.cpu import exact

ROWS, INNER, COLUMNS = 100, 64, 112


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_an_element_does_not_depend_on_other_columns_or_on_threads(threads: int, reproducible_products: None) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(ROWS, INNER), torch.randn(COLUMNS, INNER), torch.randn(COLUMNS)
    torch.set_num_threads(1)
    expected = x @ weight.T
    torch.set_num_threads(threads)
    for num_columns in (1, 8, 11, 12, 16, 24, 40, 43, 104):
        for num_rows in (3, ROWS):
            some, own = x[:num_rows], weight[:num_columns]
            assert torch.equal(exact.linear(some, own), expected[:num_rows, :num_columns]), (num_rows, num_columns)
    assert torch.equal(exact.linear(x, weight, bias), expected + bias)


def test_rows_may_have_any_dimensions() -> None:
    x, weight = torch.randn(3, 1, 5, INNER), torch.randn(21, INNER)
    assert torch.equal(exact.linear(x, weight), exact.linear(x.view(15, INNER), weight).view(3, 1, 5, 21))
    assert exact.linear(x[:0], weight).shape == (0, 1, 5, 21)
