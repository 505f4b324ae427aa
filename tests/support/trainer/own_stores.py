"""A store of its own for each of several process groups that one torchrun forms, one after the other.

torchrun's own store still has the addresses of earlier groups.
"""

import os
import socket

import torch.distributed as dist


class OwnStores:
    """Collective: every rank makes one, and begins the same groups."""

    def __init__(self) -> None:
        self._shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self._number = 0
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"

    def begin(self) -> None:
        """The next process group meets at a port that was free just now."""
        self._number += 1
        key = f"port of group {self._number}"
        if os.environ["RANK"] == "0":
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self._shared.set(key, str(listener.getsockname()[1]))
        os.environ["MASTER_PORT"] = self._shared.get(key).decode()
