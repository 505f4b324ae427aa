"""TRL's GRPO and RLOO trainers by their names and arguments, as runs of async-rl: docs/migration_trl.md.

    from async_rl.trl import GRPOConfig, GRPOTrainer

TRL itself is not needed. Importing this loads neither torch nor transformers.
"""

from async_rl.trl.arguments import GRPOConfig, RLOOConfig
from async_rl.trl.trainer import GRPOTrainer, RLOOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer"]
