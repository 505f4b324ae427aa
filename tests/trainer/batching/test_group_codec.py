"""Groups pass between ranks as tensors; tests/async_rl/method/test_group_codec.py has all that is in them."""

import json
from dataclasses import replace

import torch

from async_rl.method.token_arrays import ExpertIds
from tests.support.groups import make_group, make_response
from trainer.batching.group_codec import empty_tensors, pack_groups, unpack_groups


def test_groups_arrive_as_they_were_sent() -> None:
    sent = [make_group(i, [make_response((3, 4 + i)), make_response((5,), prompt_ids=(6, 7))]) for i in range(3)]
    routed = replace(make_response((3, 4)), routes=ExpertIds((300, 2)), prompt_routes=ExpertIds((1, 65535)))
    sent.append(make_group(3, [routed, replace(make_response((5,)), routes=ExpertIds())]))
    for groups in (sent, []):
        headers, tensors = pack_groups(groups)
        headers = json.loads(json.dumps(headers))
        received = empty_tensors(headers)
        for target, source in zip(received, tensors, strict=True):
            assert (target.shape, target.dtype) == (source.shape, source.dtype), "a broadcast needs the same on both"
            target.copy_(source)
        assert unpack_groups(headers, received) == groups


def test_tensors_have_four_bytes_for_a_token_and_for_a_log_prob() -> None:
    _, (tokens, logprobs, _) = pack_groups([make_group(0, [make_response((3,), logprobs=(-0.5,))], prompt=(1, 2))])
    assert tokens.equal(torch.tensor([1, 2, 3], dtype=torch.int32))
    assert logprobs.equal(torch.tensor([-0.5], dtype=torch.float32))
