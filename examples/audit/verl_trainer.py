import subprocess

from verl.trainer.ppo.ray_trainer import RayPPOTrainer

ENGINE = "http://127.0.0.1:8000"


class AuditedTrainer(RayPPOTrainer):
    """With trainer.save_freq = 1 and hf_model among actor.checkpoint.save_contents."""

    def _save_checkpoint(self):
        super()._save_checkpoint()
        saved = f"{self.config.trainer.default_local_dir}/global_step_{self.global_steps}/actor/huggingface"
        subprocess.run(["async-rl", "audit", "--engine", ENGINE, "--checkpoint", saved], check=True)
