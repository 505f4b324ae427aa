import subprocess

from transformers import TrainerCallback


class Audit(TrainerCallback):
    """After each batch of rollouts, while the weights are still those that sampled it; a fault ends the training."""

    def __init__(self, engine, directory):
        self.command = ["async-rl", "audit", "--engine", engine, "--checkpoint", directory]
        self.directory = directory

    def on_pre_optimizer_step(self, args, state, control, model=None, processing_class=None, **others):
        if state.is_world_process_zero:
            model.save_pretrained(self.directory)
            processing_class.save_pretrained(self.directory)
            control.should_training_stop |= subprocess.run(self.command).returncode == 1
