"""When a run saves checkpoints, and from which one it resumes."""

import logging

from async_rl.config.sections import CheckpointSection, RunSection
from async_rl.config.train_section import TrainSection
from async_rl.shared.checkpoint_names import checkpoints_dir, newest_checkpoint
from trainer.checkpoint.checkpoint import Checkpoints
from trainer.trainer import MegatronTrainer

log = logging.getLogger(__name__)


class Saving:
    """Resumes from the newest checkpoint if the config requests it; saves every few iterations and at the end."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        megatron: MegatronTrainer,
        run: RunSection,
        train: TrainSection,
        section: CheckpointSection,
    ) -> None:
        """All ranks call it and find the same checkpoint.

        Raises:
            ConfigError: the newest checkpoint is damaged, or belongs to another run or model.
        """
        self._checkpoints = checkpoints
        self._megatron = megatron
        self._every = section.every
        self._iterations = train.num_iterations
        self._model = run.dir / "model"
        self.first_iteration = 0
        newest = newest_checkpoint(checkpoints_dir(run.dir)) if run.resume else None
        trained = (megatron.models.policy, megatron.optimizer, megatron.lagged_old, megatron.critic)
        if newest is not None:
            self.first_iteration = checkpoints.load(newest, *trained)
        if section.every:
            checkpoints.find_tensors(*trained)
        self._saved = self._sound = self.first_iteration
        self._sound_counts = megatron.optimizer.counts

    def after_iteration(self, iteration: int) -> None:
        """Saves if a checkpoint is due; returns before it is written.

        Raises:
            Exception: the failure of the last save.
        """
        following = iteration + 1
        self._sound, self._sound_counts = following, self._megatron.optimizer.counts
        if self._every and (following % self._every == 0 or following == self._iterations):
            self._save()
        else:
            self._checkpoints.require_no_failure()

    @property
    def first_unsound(self) -> int:
        """The iteration after the last complete one."""
        return self._sound

    @property
    def is_sound(self) -> bool:
        """Whether the weights are those of the last complete iteration."""
        return self._megatron.optimizer.counts.taken == self._sound_counts.taken

    def go_back(self) -> None:
        """To the end of the last complete iteration, whose weights these are: skipped steps after it will be
        repeated."""
        self._megatron.optimizer.go_back(self._sound_counts)
        if self._megatron.critic is not None:
            self._megatron.critic.optimizer.go_back(self._sound_counts)

    def save_last(self) -> None:
        """Saves the last complete iteration of a run that ends early, and waits until it is written.

        Nothing is saved if checkpoints are off, if that iteration is saved already, or if the weights have changed
        since: after some, but not all, of several steps per batch.

        Raises:
            Exception: the failure of the save.
        """
        if not self._every:
            log.info("no checkpoint: checkpoint.every = 0")
        elif self._sound == self._saved:
            self._checkpoints.wait()
            log.info("the last whole iteration is saved: go on from iteration %d", self._saved)
        elif not self.is_sound:
            log.error(
                "the weights are not those of a whole iteration, of which a checkpoint could be made: go on from "
                "iteration %d",
                self._saved,
            )
        else:
            self.go_back()
            self._save()
            self._checkpoints.wait()
            log.info("saved a checkpoint: go on from iteration %d with run.resume = true", self._saved)

    def _save(self) -> None:
        # That takes as long as the disk does.
        self._checkpoints.wait()
        with self._megatron.device_watch.during(f"copying the state of iteration {self._sound} for a checkpoint"):
            # With the last checkpoint the run is trained but for its model, which comes while that is written: one that
            # is there already is of fewer iterations.
            outdated = self._model if self._sound == self._iterations else None
            self._checkpoints.save(self._sound, self._megatron.optimizer, outdated)
        self._saved = self._sound
