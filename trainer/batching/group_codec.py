"""Groups as a JSON header and two tensors, which ranks broadcast: `async_rl.method.group_codec` as tensors."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from async_rl.method import group_codec
from async_rl.method.group_codec import Header
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import Group


def pack_groups(groups: Sequence[Group]) -> tuple[list[Header], torch.Tensor, torch.Tensor]:
    """(header per group, token ids int32 [T], rollout log-probs float32 [N]); texts and rows are left out."""
    headers, tokens, logprobs = group_codec.pack(groups)
    return headers, torch.from_numpy(tokens), torch.from_numpy(logprobs)


def empty_tensors(headers: Sequence[Header]) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty tensors of the sizes that `headers` describe, to receive into."""
    num_tokens, num_logprobs = group_codec.sizes(headers)
    return torch.empty(num_tokens, dtype=torch.int32), torch.empty(num_logprobs, dtype=torch.float32)


def unpack_groups(headers: Sequence[Header], tokens: torch.Tensor, logprobs: torch.Tensor) -> list[Group]:
    """The groups that `pack_groups` packed."""
    return group_codec.unpack(headers, tokens.numpy(), logprobs.numpy())


def joined_tensor(parts: Iterable[TokenIds] | Iterable[Logprobs], dtype: torch.dtype) -> torch.Tensor:
    """The values of all parts, one after the other, as a tensor of `dtype` on the host."""
    views = [part.buffer for part in parts]
    if not views:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(np.frombuffer(bytearray().join(views), views[0].format)).to(dtype)
