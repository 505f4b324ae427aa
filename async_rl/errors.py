"""Errors of a run. Invalid user input is a `ConfigError` (a ValueError); internal mistakes are assertions.

`may_pass` of a class: whether the same program, started again, may do without the error. Launchers restart only then.

AsyncRLError
├── ConfigError (also ValueError)   a setting, model or dataset that cannot work
│   └── RunDirInUse                 another run is using the run's directory
├── OnPolicyViolation               the batch's on-policy proof fails: no optimizer step is taken
├── NonFiniteGradient               the gradient is infinite or NaN, too often in a row
├── UpdatesRoundedAway              what an adapter has learned is lost where it is merged into published weights
├── InstanceError                   one inference instance failed a call
│   ├── InstanceUnreachable         no response in time
│   │   ├── ConnectionLost          no connection, or it was lost
│   │   └── InstanceStalled         it accepted a request, and generates no tokens
│   ├── InstanceTooSlow             it did not finish a request in time, but it generates tokens
│   ├── InstanceRefused             it responded with an error status
│   │   ├── RequestInvalid          400, 413 or 422: no instance would take this request
│   │   └── NeedsWeights            it runs, but its last weight update is incomplete: a complete one restores service
│   ├── WeightGroupBroken           the group that its weights are sent through was not formed, or broke
│   ├── BrokenAnswer                its response is no valid sample of the request
│   ├── StaleWeights                it responded with tokens of another weight version
│   │   └── InstanceRestarted       the process at its address is not the one that was put in service
│   └── PromptFailed                several instances in turn failed at the same prompt
├── NoAnswer                        a server of the run gave no complete response to a program's request
├── UnknownInstance                 the fleet has no instance of that name
├── NoInstanceLeft                  every instance is out of service, for longer than pool.timeout_s
├── PublishError                    weights could not be transferred to any instance
│   └── WeightsRefused              every instance refuses them, or computes otherwise with them
├── RewardError                     a reward raised, hung or returned something else than one float per response
├── NodeFailed                      a node of the pipeline raised, hung or returned something else than it writes
├── RolloutFailed                   a rollout program raised, exited or generated nothing, too often
├── SandboxFailed                   a sandbox did not start or end
├── RolloutLost                     the rollout of a prompt ended without a group and without an error
├── EventLoopLost                   the rollout thread ended, or other code ended one of its coroutines
├── WriteFailed                     a file of the run cannot be written: a full disk, or a missing directory
├── WaitTimedOut (also TimeoutError)  a coroutine or process did not end in time when it was asked to
├── RunStopped                      the run was asked to end (SIGTERM)
├── ProducerFailed                  the producer failed by an internal error
├── ProducerLost                    the producer has ended, or does not answer
├── LeaderFailed                    the training rank that leads a replica's rollouts failed
├── RankLost                        another training rank is gone or stopped, this one is cut off, or its device hangs
├── Fenced                          another trainer has taken over the run
├── FleetLost                       no trainer has answered an instance for its --patience-s
├── ProcessFailed                   a process of a deployment ended unexpectedly
├── RestartsExhausted               a task of a run died again and again, without progress in between
└── NotPlaced                       a cluster has no room for the tasks of a run
"""

from typing import ClassVar


class AsyncRLError(Exception):
    """Root of all errors that async-rl raises on purpose."""

    may_pass: ClassVar[bool] = True
    """Whether a restart may help, from the last checkpoint and with the same input."""


class ConfigError(AsyncRLError, ValueError):
    """A setting, model or dataset that cannot work; the message names the value, what was expected and the remedy."""

    may_pass = False


class RunDirInUse(ConfigError):
    """Another run is using the run's directory, or is still saving there."""

    may_pass = True


class OnPolicyViolation(AsyncRLError):
    """The batch's groups are not exactly the expected ones, or not all of the weight version in training."""

    may_pass = False


class NonFiniteGradient(AsyncRLError):
    """The gradient is infinite or NaN, as in the steps before; no optimizer step was taken with it."""

    may_pass = False


class UpdatesRoundedAway(AsyncRLError):
    """An adapter's update is lost in the rounding of the published weights; the rollouts are those of the base."""

    may_pass = False


class InstanceError(AsyncRLError):
    """One inference instance failed a call; the pool tries another one."""


class InstanceUnreachable(InstanceError):
    """No connection to the instance, or it was lost, or the call exceeded its timeout, or the engine died."""


class ConnectionLost(InstanceUnreachable):
    """The connection to the instance could not be made or was lost; not a timeout."""


class InstanceStalled(InstanceUnreachable):
    """The instance accepted a request, but generated no token for `pool.request_timeout_s`, or its engine died."""


class InstanceTooSlow(InstanceError):
    """The instance generated no token of a request for `pool.request_timeout_s`, but did for other requests."""


class InstanceRefused(InstanceError):
    """The instance responded with an error status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class RequestInvalid(InstanceRefused):
    """The instance responded with 400, 413 or 422: the request itself is at fault, so no other instance is tried."""

    may_pass = False


class NeedsWeights(InstanceRefused):
    """The instance runs, but its last weight update is incomplete; a complete one puts it back into service."""


class WeightGroupBroken(InstanceError):
    """The instance's weight group could not be formed or broke, for which any of its members may be to blame."""


class BrokenAnswer(InstanceError):
    """The instance's response is no valid sample of the request: too many or too few tokens, or log-probs that are not
    numbers. It must not serve until the next publish."""


class StaleWeights(InstanceError):
    """The instance responded with tokens sampled from another weight version than the requested one."""


class InstanceRestarted(StaleWeights):
    """The process at the instance's address is not the one that was put in service."""

    def __init__(self, message: str, boot_id: str) -> None:
        super().__init__(message)
        self.boot_id = boot_id


class PromptFailed(InstanceError):
    """Several instances in turn failed at the same prompt; they stay in service, the run ends and names the prompt."""

    may_pass = False


class NoAnswer(AsyncRLError):
    """A server gave no complete response to a program's request; the message gives the reason."""


class UnknownInstance(AsyncRLError):
    """The fleet has no instance of that name or URL."""

    may_pass = False


class NoInstanceLeft(AsyncRLError):
    """Every instance is out of service, and none returned within `pool.timeout_s`."""


class PublishError(AsyncRLError):
    """The weights of an iteration could not be transferred to any instance."""


class WeightsRefused(PublishError):
    """Every instance refuses the weights, or computes something else with them; a restart would meet the same."""

    may_pass = False


class RewardError(AsyncRLError):
    """A reward raised, hung, or returned something other than one finite float per response."""

    may_pass = False


class SandboxFailed(AsyncRLError):
    """An isolated process did not start, or did not end when it was killed; not a fault of the program in it."""


class NodeFailed(AsyncRLError):
    """A node of `pipeline.nodes` raised, hung or returned something else; its message names all of it."""

    may_pass = False


class RolloutFailed(AsyncRLError):
    """A rollout program raised, exited, generated nothing or gave no reward, `rollout.options.max_attempts` times."""

    may_pass = False


class RolloutLost(AsyncRLError):
    """The rollout of a prompt ended without a group and without an error: other code cancelled it."""


class EventLoopLost(AsyncRLError):
    """The rollout thread ended, or other code on it ended a coroutine."""


class WriteFailed(AsyncRLError):
    """A file of a run cannot be written; the message names it, the system's error and the remedy."""

    may_pass = False


class WaitTimedOut(AsyncRLError, TimeoutError):
    """Something that was asked to end did not do so in time; the message names it."""


class RunStopped(AsyncRLError):
    """The run was asked to end early, by SIGTERM to any of its training ranks."""

    may_pass = False


class ProducerFailed(AsyncRLError):
    """The producer failed by an error that is none of these; the message has its traceback."""


class ProducerLost(AsyncRLError):
    """The producer of the run has ended, or has said nothing for `trainer.lost_after_s`."""


class LeaderFailed(AsyncRLError):
    """The training rank that leads a replica's rollouts failed; raised on the replica's other ranks."""


class RankLost(AsyncRLError):
    """Another training rank has not been heard of for `trainer.lost_after_s`, or nothing has, since this one is cut
    off from the others; or this one is alone, and its device does not finish its work."""


class Fenced(AsyncRLError):
    """Another trainer has taken over the run: this one must not change its files or its instances any more."""

    may_pass = False


class FleetLost(AsyncRLError):
    """No trainer has answered this instance for its `--patience-s`."""

    may_pass = False


class ProcessFailed(AsyncRLError):
    """A process of a deployment ended too early; `cause` is the named error it ended with, if any."""

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class RestartsExhausted(AsyncRLError):
    """A task of a run died more often than `cluster.max_restarts` without another iteration in between."""

    may_pass = False


class NotPlaced(AsyncRLError):
    """A cluster found no room for tasks of the run in time."""
