"""The stand-in for torch_npu: naive attention where it answers, and the documented refusals where it does not."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.devices.fake_torch_npu import FakeTorchNPU

MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
Q_ENDS, KV_ENDS = [2, 7, 11], [6, 11, 18]
UNLIMITED = 2147483647


def visible(mode: int, i: int, j: int, num_q: int, num_kv: int, before: int, after: int) -> bool:
    """Whether query i sees key j, as the page's drawings of the sparse modes have it."""
    from_corner = j - i - (num_kv - num_q)
    return {
        0: True,
        1: True,
        2: j <= i,
        3: from_corner <= 0,
        4: -before <= from_corner <= after,
    }[mode]


def naive(query: Any, key: Any, value: Any, mode: int, scale: float, before: int, after: int) -> torch.Tensor:
    """Attention sequence by sequence, head by head, row by row."""
    group_size = query.shape[1] // key.shape[1]
    rows = []
    for (q0, q1), (k0, k1) in zip(pairwise([0, *Q_ENDS]), pairwise([0, *KV_ENDS]), strict=True):
        for i in range(q1 - q0):
            seen = [j for j in range(k1 - k0) if visible(mode, i, j, q1 - q0, k1 - k0, before, after)]
            heads = []
            for head in range(query.shape[1]):
                keys, values = (x[k0:k1, head // group_size][seen] for x in (key, value))
                weights = torch.softmax(keys @ query[q0 + i, head] * scale, 0)
                heads.append(weights @ values)
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.fixture
def inputs(rng: random.Random) -> list[torch.Tensor]:
    """Query of 4 heads, key and value of 2, gradient of the output."""
    shapes = ((11, 4), (18, 2), (18, 2), (11, 4))
    return [torch.randn(*shape, 8, dtype=torch.float64) for shape in shapes]


@pytest.fixture
def call(inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """`call(sparse_mode=3)`: forward on the inputs, with what it is given in place of good arguments."""
    fake = FakeTorchNPU((torch.float64, torch.float32))

    def run(**changed: Any) -> Any:
        query, key, value, _ = inputs
        good = {"query": query, "key": key, "value": value, "head_num": 4, "input_layout": "TND", "scale": 0.3}
        good |= {"actual_seq_qlen": Q_ENDS, "actual_seq_kvlen": KV_ENDS, "softmax_layout": "TND"}
        return fake.npu_fusion_attention(**(good | changed))

    return run


@pytest.mark.parametrize("layout", ["TND", ""])
@pytest.mark.parametrize(
    ("mode", "mask", "before", "after"),
    [
        (0, None, UNLIMITED, UNLIMITED),
        (1, torch.zeros(5, 7, dtype=torch.bool), UNLIMITED, UNLIMITED),
        (2, MASK, UNLIMITED, UNLIMITED),
        (3, MASK, UNLIMITED, UNLIMITED),
        (4, MASK, 3, 1),
    ],
)
def test_it_is_naive_attention_forward_and_backward(
    inputs: list[torch.Tensor],
    call: Callable[..., Any],
    mode: int,
    mask: torch.Tensor | None,
    before: int,
    after: int,
    layout: str,
) -> None:
    options = {"atten_mask": mask, "sparse_mode": mode, "pre_tockens": before, "next_tockens": after}
    out, maximum, total, *_ = call(**options, softmax_layout=layout)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    expected = naive(*leaves, mode, 0.3, before, after)
    torch.testing.assert_close(out, expected.detach())
    assert maximum.shape == total.shape == (11, 4, 8)
    grads = FakeTorchNPU((torch.float64,)).npu_fusion_attention_grad(
        *inputs,
        4,
        "TND",
        softmax_max=maximum,
        softmax_sum=total,
        attention_in=out,
        scale_value=0.3,
        actual_seq_qlen=Q_ENDS,
        actual_seq_kvlen=KV_ENDS,
        softmax_layout=layout,
        **options,
    )
    torch.testing.assert_close(grads[:3], torch.autograd.grad(expected, leaves, inputs[3]))


def test_without_a_mask_attention_is_full_whatever_the_mode(call: Callable[..., Any]) -> None:
    torch.testing.assert_close(call(sparse_mode=3)[0], call(sparse_mode=0)[0])


def test_statistics_lie_head_by_head_unless_the_order_of_rows_is_asked_for(call: Callable[..., Any]) -> None:
    by_row, by_head = (call(softmax_layout=layout)[1] for layout in ("TND", ""))
    assert not torch.equal(by_row, by_head)
    torch.testing.assert_close(by_head.view(-1, 8)[:8].view(4, 2, 8), by_row[:2].transpose(0, 1))


def test_sequences_of_trailing_zeros_take_no_part(call: Callable[..., Any]) -> None:
    out = call(actual_seq_qlen=[2, 7, 0], actual_seq_kvlen=[6, 11, 0])[0]
    torch.testing.assert_close(out[:7], call()[0][:7])
    assert not out[7:].any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"actual_seq_qlen": torch.tensor(Q_ENDS)}, "must be a list of ints"),
        ({"actual_seq_qlen": [2.0, 7.0, 11.0]}, "must be Python ints"),
        ({"actual_seq_qlen": None}, "must be a list of ints"),
        ({"actual_seq_qlen": [1] * 1025}, "at most 1024"),
        ({"actual_seq_qlen": [2, 11]}, "2 query and 3 key lengths"),
        ({"actual_seq_qlen": [0, 2, 7, 11], "actual_seq_kvlen": [0, *KV_ENDS]}, "a leading 0"),
        ({"actual_seq_qlen": [2, 7, 12]}, "ends at 12, there are 11 rows"),
        ({"actual_seq_qlen": [7, 2, 11]}, "must be cumulative"),
        ({"actual_seq_kvlen": [6, 6, 18]}, "queries without any key"),
        ({"sparse_mode": 9}, "sparse_mode 9"),
        ({"sparse_mode": 3, "atten_mask": MASK[:5, :7]}, "takes the 2048 x 2048 mask"),
        ({"sparse_mode": 3, "atten_mask": ~MASK}, "not strictly upper"),
        ({"sparse_mode": 3, "atten_mask": MASK, "actual_seq_kvlen": [1, 6, 18]}, "a row without any key"),
        ({"sparse_mode": 3, "atten_mask": MASK.float()}, r"atten_mask is torch\.float32"),
        ({"input_layout": "BSND"}, "input_layout"),
        ({"head_num": 2}, "head_num 2"),
        ({"softmax_layout": "NTD"}, "softmax_layout"),
        ({"query": torch.zeros(11, 4, 8)}, r"dtype torch\.float32"),
        ({"query": torch.zeros(4, 11, 8, dtype=torch.float64).transpose(0, 1)}, "must be contiguous"),
    ],
)
def test_what_the_documentation_rules_out_is_refused(
    call: Callable[..., Any], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(**changed)
