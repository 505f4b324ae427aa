"""Gives every rank of a replica the same windows of micro-batches, from the groups that its leader's rollouts finish.

Followers wait for the leader, and the leader waits for rollouts; a failure of the leader is reported to them as
`LeaderFailed`.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import LeaderFailed
from async_rl.loop import Window
from async_rl.method.training_order import TrainingOrder
from trainer.batching.group_codec import empty_tensors, pack_groups, unpack_groups
from trainer.batching.packing import pack_windows
from trainer.parallel import Parallel

_FAILED = 2**40
"""Sent to the replicas that share experts, in place of a number of micro-batches, when one of them has failed."""


class GroupFeed:
    """The windows of one rank; micro-batches have at most `micro_batch_tokens` rows, except for one longer group.

    A window is one micro-batch, or everything that is ready (`TrainerSection.trains_backlogs`).
    """

    def __init__(self, parallel: Parallel, section: TrainerSection) -> None:
        self._parallel = parallel
        self._max_tokens = section.micro_batch_tokens
        self._whole_backlog = section.trains_backlogs
        self._replica = parallel.replica
        self._leader = dist.get_global_rank(self._replica, 0)
        self._has_followers = dist.get_world_size(self._replica) > 1

    def windows(self, order: TrainingOrder) -> Iterator[Window]:
        """The windows of one mini-batch, the same on all ranks of the replica; `order` is read on its leader only.

        Replicas that share experts all get as many windows as the one with the most; the extra windows of the other
        replicas are empty. `make_passes` agrees on what is run in each window.

        Raises:
            LeaderFailed: on followers, when the leader's rollouts failed, and on replicas that share experts with it;
                the leader raises the failure itself.
        """
        windows = self._lead(order) if self._parallel.is_leader else self._follow()
        return self._with_expert_peers(windows)

    def _lead(self, order: TrainingOrder) -> Iterator[Window]:
        windows = pack_windows(order, self._max_tokens, self._whole_backlog)
        while True:
            try:
                window = next(windows, [])
            except BaseException as error:
                # Reported to the followers, which would otherwise wait forever, and raised.
                self._send_header({"failed": f"{type(error).__name__}: {error}"})
                raise
            self._send(window)
            if not window:
                return
            yield window

    def _follow(self) -> Iterator[Window]:
        while True:
            header = self._parallel.broadcast_json(None, self._leader, self._replica)
            if "failed" in header:
                raise LeaderFailed(f"the leader of replica {self._parallel.dp_rank} failed: {header['failed']}")
            if not header["sizes"]:
                return
            tensors = empty_tensors(header["groups"])
            for tensor in tensors:
                self._broadcast(tensor)
            groups = iter(unpack_groups(header["groups"], tensors))
            yield [[next(groups) for _ in range(size)] for size in header["sizes"]]

    def _send(self, window: Window) -> None:
        if not self._has_followers:
            return
        headers, tensors = pack_groups([group for groups in window for group in groups])
        self._send_header({"sizes": [len(groups) for groups in window], "groups": headers})
        if window:
            for tensor in tensors:
                self._broadcast(tensor)

    def _send_header(self, header: dict[str, object]) -> None:
        if self._has_followers:
            self._parallel.broadcast_json(header, self._leader, self._replica)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            dist.broadcast(tensor, self._leader, group=self._replica)

    def _with_expert_peers(self, windows: Iterator[Window]) -> Iterator[Window]:
        while True:
            try:
                window = next(windows, [])
            except BaseException:
                self._parallel.most_among_expert_peers(_FAILED)
                raise
            most = self._parallel.most_among_expert_peers(len(window))
            if most == [0]:
                return
            if most == [_FAILED]:
                raise LeaderFailed("the rollouts of another replica failed, which this one shares experts with")
            yield window
