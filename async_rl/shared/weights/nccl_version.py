"""The NCCL of this process: all members of a weight group over nccl must have the same, else none can connect.

Reported by an instance's workers, and compared by the trainer before it invites them.
"""

import torch

UNKNOWN = "none"


def nccl_version() -> str:
    """Such as "2.29.7 (torch 2.13.0+cu130)"; `UNKNOWN` in place of the number where torch has no NCCL."""
    has_nccl = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    number = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else UNKNOWN
    return f"{number} (torch {torch.__version__})"
