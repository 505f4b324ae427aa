"""Where a run stands on its checkpoints: where it goes on, and when it saves."""

from async_rl.config import CheckpointSection, RunSection, TrainSection
from trainer.checkpoint import Checkpoints
from trainer.checkpoint_files import checkpoints_dir, newest_checkpoint
from trainer.trainer import MegatronTrainer


class Progress:
    """Goes on from the newest checkpoint if the run asks for it; saves every few iterations and at the end."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        megatron: MegatronTrainer,
        run: RunSection,
        train: TrainSection,
        section: CheckpointSection,
    ) -> None:
        """All ranks call it, and find the same checkpoint.

        Raises:
            ConfigError: the newest checkpoint is damaged, or belongs to another run or model.
        """
        self._checkpoints = checkpoints
        self._megatron = megatron
        self._every = section.every
        self._iterations = train.iterations
        self.first_iteration = 0
        newest = newest_checkpoint(checkpoints_dir(run.dir)) if run.resume else None
        if newest is not None:
            models = megatron.models
            self.first_iteration = checkpoints.load(newest, models.policy, megatron.optimizer, megatron.lagged_old)

    def after_iteration(self, iteration: int) -> None:
        """Saves if a checkpoint is due; returns before it is written.

        Raises:
            Exception: what made the last save fail.
        """
        following = iteration + 1
        if self._every and (following % self._every == 0 or following == self._iterations):
            models = self._megatron.models
            self._checkpoints.save(following, models.policy, self._megatron.optimizer, self._megatron.lagged_old)
        else:
            self._checkpoints.require_no_failure()
