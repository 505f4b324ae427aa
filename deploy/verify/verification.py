"""The checks of `async-rl verify` in order, each a stage or a comparison of two; called by `__main__.py`.

First the iterations are trained as the config says, beside generation, while their groups are recorded and every
instance is diagnosed. If an instance is at fault there, the rest is not tested. Else the same groups are trained again,
synchronously, and everything is compared; then faults are planted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.config.rollout_section import SINGLE_TURN
from async_rl.config.sections import Config
from async_rl.errors import OnPolicyViolation, ProcessFailed
from async_rl.records.findings import Finding, all_hold, fails, holds, not_tested
from deploy.cluster.process import Running
from deploy.verify.comparison import Comparison, Trained, compared, why_no_gradient, why_no_step
from deploy.verify.instances import judge_canary, judge_instances, read_json
from deploy.verify.stages import CAN_KILL, Ended, Stages, has_checkpoint, kill, num_trained

TRAINING, PROOF = "training", "on-policy proof"
GRADIENTS, LOSSES, WEIGHTS = "gradient norms", "losses", "weights"
COMPLETION = "in order of completion"
RESUME, LOST = "resume after kill -9", "one instance lost"

LEAST_LOSS = 1.0
"""Advantages have a deviation of 1, and losses are means of them that may cancel out."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scope:
    """What is verified: `config` as it is run, `iterations` of it; `quick` leaves the planted faults out."""

    config: Config
    iterations: int
    quick: bool
    num_instances: int

    @property
    def is_repeatable(self) -> bool:
        """Whether a further run samples the same tokens: in bfloat16 and on GPUs they depend on the batch."""
        config = self.config
        on_cpu = config.trainer.device == "cpu" and config.model.dtype == "float32"
        return on_cpu and config.inference.engine == "transformers"

    @property
    def mode(self) -> str:
        """Of a user's own algorithm only the trainer knows whether it waits for batches; the config allows for it."""
        algorithm, mode = self.config.algorithm, self.config.train.mode
        return mode if algorithm.is_own else "synchronous" if algorithm.waits_for_batch else "periodic"


def _said(failure: ProcessFailed) -> str:
    return f"{failure.cause}: {failure}" if failure.cause else str(failure)


class Verification:
    """One verification; `findings` grows with each check."""

    def __init__(self, stages: Stages, scope: Scope, say: Say) -> None:
        self._stages = stages
        self._scope = scope
        self._say = say
        self.findings: list[Finding] = []
        config = scope.config
        self._exactly = Comparison(
            scope.iterations, config.model.dtype, config.model.path, config.trainer.device == "cpu"
        )
        self._nearly = Comparison(scope.iterations, config.model.dtype, config.model.path, demands_bits=False)

    def run(self) -> None:
        """Does all checks.

        Raises:
            ConfigError: the config is not usable.
            ProcessFailed: an instance did not start.
        """
        self._say(f"starting {self._scope.num_instances} instance(s)")
        self._stages.start_instances()
        recorded = self._record()
        if recorded is None:
            return
        self._compare_with_synchronous(recorded)
        self._compare_in_order_of_completion(recorded)
        self._resume(recorded)
        self._lose_instance(recorded)

    def _record(self) -> Trained | None:
        """Trains as the config says; None if an instance, or the run, is at fault."""
        self._say(f"training {self._scope.iterations} iterations beside generation ({self._scope.mode})")
        ended = self._stages.run(
            "periodic", f"--train.mode={self._scope.mode}", program=("trainer.verify", "record-all", str(self._groups))
        )
        refused = read_json(ended.run_dir / "not_in_service.json")
        judged = ended
        if refused:
            self._say(f"{len(refused)} instance(s) are not put in service: looking for the reason")
            judged = self._stages.run(
                "diagnosis",
                *("--publish.canary=off", f"--train.mode={self._scope.mode}"),
                program=("trainer.verify", "record", str(self._groups)),
            )
        found = read_json(judged.run_dir / "instances.json")
        self.findings += judge_canary(self._stages.urls, refused, found)
        self.findings += judge_instances(self._stages.urls, found, takes_first=self._scope.config.prompts.reserve > 0)
        recorded = Trained.read(ended.run_dir)
        is_broken = any(finding.outcome == "fails" for finding in self.findings)
        if ended.failure is None and not refused:
            self.findings.append(self._proof(recorded))
        elif ended.failure is not None and not is_broken:
            check = PROOF if ended.failure.cause == OnPolicyViolation.__name__ else TRAINING
            self.findings.append(fails(check, _said(ended.failure)))
        if all_hold(self.findings):
            return recorded
        why = "an instance is at fault" if is_broken else "the iterations could not be trained"
        for check in (GRADIENTS, LOSSES, WEIGHTS, COMPLETION, RESUME, LOST):
            self.findings.append(not_tested(check, f"{why}: correct that and verify again"))
        return None

    @property
    def _groups(self) -> Path:
        return self._stages.groups

    def _proof(self, run: Trained) -> Finding:
        num_tokens = sum(proof["num_response_tokens"] for proof in run.ledger)
        num_groups = sum(proof["num_groups"] for proof in run.ledger)
        text = f"{num_groups} groups with {num_tokens} tokens, each once and of the version in training"
        if not run.is_proven(self._scope.iterations):
            return fails(PROOF, f"only {len(run.metrics)} of {self._scope.iterations} iterations are proven")
        return holds(PROOF, f"{self._scope.iterations} iterations: {text}", "strict")

    def _compare_with_synchronous(self, recorded: Trained) -> None:
        self._say("training the same samples synchronously")
        ended = self._replay("synchronous", "--train.mode=synchronous")
        self.findings += self._compare(recorded, ended, self._exactly, (GRADIENTS, LOSSES, WEIGHTS))

    def _compare_in_order_of_completion(self, recorded: Trained) -> None:
        config = self._scope.config
        if config.train.order == "prompt" or self._scope.mode == "synchronous":
            return
        if self._scope.quick:
            self.findings.append(not_tested(COMPLETION, "left out with --quick"))
            return
        self._say("training the same samples in the order in which they finished")
        ended = self._replay("completion", "--train.mode=periodic", "--train.order=completion")
        names = [f"{name} {COMPLETION}" for name in (GRADIENTS, LOSSES, WEIGHTS)]
        self.findings += self._compare(recorded, ended, self._nearly, names)

    def _replay(self, name: str, *overrides: str) -> Ended:
        return self._stages.run(name, *overrides, program=("trainer.verify", "replay", str(self._groups)))

    def _compare(self, recorded: Trained, ended: Ended, comparison: Comparison, names: Sequence[str]) -> list[Finding]:
        gradients, losses, weights = names
        if ended.failure is not None:
            return [fails(name, _said(ended.failure)) for name in names]
        other, power = Trained.read(ended.run_dir), why_no_gradient(recorded)
        return [
            compared(gradients, power, lambda: comparison.figures(gradients, "grad_norm", recorded, other, 0.0)),
            compared(losses, power, lambda: comparison.figures(losses, "loss", recorded, other, LEAST_LOSS)),
            compared(weights, why_no_step(recorded), lambda: comparison.weights(weights, recorded, other)),
        ]

    def _resume(self, recorded: Trained) -> None:
        if why := self._why_no_fault("" if self._scope.iterations > 1 else "it needs --iterations 2 or more"):
            self.findings.append(not_tested(RESUME, why))
            return
        self._say("killing the trainer after an iteration, and going on from its checkpoint")
        killed_after = 0

        def kill_after_iteration(running: Running, run_dir: Path) -> None:
            nonlocal killed_after
            if num_trained(run_dir) and has_checkpoint(run_dir):
                killed_after = num_trained(run_dir)
                kill(running)

        overrides = (f"--train.mode={self._scope.mode}", "--checkpoint.every=1")
        self._stages.run("resumed", *overrides, while_running=kill_after_iteration)
        if not killed_after or killed_after >= self._scope.iterations:
            why = "the trainer ended before it could be killed: raise --iterations"
            self.findings.append(not_tested(RESUME, why))
            return
        ended = self._stages.run("resumed", *overrides, "--run.resume=true")
        self.findings.append(self._same_run(RESUME, f"killed after iteration {killed_after}", ended, recorded))

    def _lose_instance(self, recorded: Trained) -> None:
        """The last check: the instance stays dead."""
        alone = "the only instance: set inference.num_instances = 2" if self._scope.num_instances < 2 else ""
        if why := self._why_no_fault(alone):
            self.findings.append(not_tested(LOST, why))
            return
        self._say("killing an instance amid a batch")
        is_killed = False
        first = min(1, self._scope.iterations - 1)

        def kill_instance(running: Running, run_dir: Path) -> None:
            nonlocal is_killed
            if not is_killed and num_trained(run_dir) >= first and self._stages.num_requests(0) > 0:
                self._stages.kill_instance(0)
                is_killed = True

        ended = self._stages.run("lost", f"--train.mode={self._scope.mode}", while_running=kill_instance)
        run = Trained.read(ended.run_dir)
        keys = ("retries", "num_continued", "num_resampled")
        num_hit = sum(record[key] for record in run.metrics for key in keys)
        if ended.failure is None and not (is_killed and num_hit):
            why = "no request was under way when the instance was lost: raise --iterations, or lengthen the responses"
            self.findings.append(not_tested(LOST, why))
            return
        self.findings.append(self._same_run(LOST, f"{num_hit} requests or responses were continued", ended, recorded))

    def _same_run(self, check: str, said: str, ended: Ended, recorded: Trained) -> Finding:
        if ended.failure is not None:
            return fails(check, _said(ended.failure))
        run = Trained.read(ended.run_dir)
        has_program = self._scope.config.rollout.program != SINGLE_TURN
        return self._nearly.same_run(
            check, said, run, recorded, is_repeatable=self._scope.is_repeatable, has_program=has_program
        )

    def _why_no_fault(self, why: str) -> str:
        """Why a fault is not planted; empty if it is."""
        if self._scope.quick:
            return "left out with --quick"
        return why or ("" if CAN_KILL else "only Linux kills what a killed process started")
