"""The layers are swapped in place: same weights, same names, same function."""

import torch

from async_rl.shared.cpu.products import Linear, use_faster_products


class Odd(torch.nn.Linear):
    """With a forward of its own, which must stay."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def test_layers_compute_the_same_with_their_own_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.Linear(300, 8, bias=False), Odd(8, 8))
    names, weights = list(model.state_dict()), list(model.parameters())
    inputs = [torch.randn(num_rows, 16) for num_rows in (1, 5, 700)]
    with torch.no_grad():
        before = [model(x) for x in inputs]
        use_faster_products(model)
        after = [model(x) for x in inputs]
    assert [type(layer) for layer in model] == [Linear, Linear, Odd]
    assert list(model.state_dict()) == names and all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours, theirs)
