"""Groups as a JSON header and three tensors, which ranks broadcast: `async_rl.method.group_codec` as tensors."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from async_rl.method import group_codec
from async_rl.method.group_codec import Header
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import Group

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Token ids int32 [T], rollout log-probs float32 [N], and the bytes of routes, uint8 [2 R]: few ranks send uint16."""


def pack_groups(groups: Sequence[Group]) -> tuple[list[Header], Tensors]:
    """(Header per group, all of their values); texts and rows are left out."""
    headers, tokens, logprobs, routes = group_codec.pack(groups)
    return headers, (torch.from_numpy(tokens), torch.from_numpy(logprobs), torch.from_numpy(routes.view(np.uint8)))


def empty_tensors(headers: Sequence[Header]) -> Tensors:
    """Empty tensors of the sizes that `headers` describe, to receive into."""
    num_tokens, num_logprobs, num_routes = group_codec.sizes(headers)
    return (
        torch.empty(num_tokens, dtype=torch.int32),
        torch.empty(num_logprobs, dtype=torch.float32),
        torch.empty(group_codec.EXPERT.itemsize * num_routes, dtype=torch.uint8),
    )


def unpack_groups(headers: Sequence[Header], tensors: Tensors) -> list[Group]:
    """The groups that `pack_groups` packed."""
    return group_codec.unpack(headers, *(tensor.numpy() for tensor in tensors))


def joined_tensor(parts: Iterable[TokenIds] | Iterable[Logprobs], dtype: torch.dtype) -> torch.Tensor:
    """The values of all parts, one after the other, as a tensor of `dtype` on the host."""
    views = [part.buffer for part in parts]
    if not views:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(np.frombuffer(bytearray().join(views), views[0].format)).to(dtype)
