"""Faults of a run. Bad input from a user is a `ConfigError` (a ValueError); our own mistakes are assertions.

AsyncRLError
├── ConfigError (also ValueError)   a setting, model or dataset that cannot work
├── OnPolicyViolation               the batch's proof does not hold: no optimizer step is taken
├── NonFiniteGradient               the gradient is infinite or not a number, once or too often (train.on_nonfinite)
├── InstanceError                   one inference instance failed a call
│   ├── InstanceUnreachable         it did not answer in time
│   │   ├── ConnectionLost          no connection, or it broke
│   │   └── InstanceStalled         it took a request, and makes no tokens
│   ├── InstanceTooSlow             it did not finish a request in time, but it makes tokens
│   ├── InstanceRefused             it answered with an error status
│   │   └── NeedsWeights            it runs, but holds half an update: the next whole one puts it back into service
│   ├── BrokenAnswer                it answered with what is no sample of what was asked for
│   ├── StaleWeights                it answered with tokens of another weight version
│   │   └── InstanceRestarted       another process answers under its address than was put in service
│   └── PromptFailed                instance after instance failed at the same prompt
├── NoAnswer                        a server of the run gave no whole answer to a program that asked it
├── UnknownInstance                 the fleet has no instance of that name
├── NoInstanceLeft                  every instance is out of service, for longer than pool.timeout_s
├── PublishError                    weights could not be moved to any instance
├── RewardError                     a reward raised, hung or returned something else than one float per response
├── RolloutLost                     the rollout of a prompt ended without a group and without an error
├── EventLoopLost                   the thread that makes rollouts ended, or a part of it was ended from beside
├── WriteFailed                     a file of the run cannot be written: a full disk, or a directory that is gone
├── WaitTimedOut (also TimeoutError)  something that was told to end did not
├── RunStopped                      the run was told to end (SIGTERM)
├── LeaderFailed                    the training rank that makes a replica's rollouts failed
└── ProcessFailed                   a process of a local deployment ended unexpectedly
"""


class AsyncRLError(Exception):
    """Root of all errors that async-rl raises on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """A setting, model or dataset that cannot work; the message names the value, what was expected and the remedy."""


class OnPolicyViolation(AsyncRLError):
    """The groups of a batch are not exactly the batch, or not all of the weight version that is training."""


class NonFiniteGradient(AsyncRLError):
    """The gradient has an infinity or NaN, and `train.on_nonfinite` ends the run; no optimizer step was taken on it."""


class InstanceError(AsyncRLError):
    """One inference instance failed a call; the pool tries another one."""


class InstanceUnreachable(InstanceError):
    """No connection to the instance, or it broke, or the call took longer than its timeout, or its engine has died."""


class ConnectionLost(InstanceUnreachable):
    """There was no connection to the instance, or it broke: not a matter of time."""


class InstanceStalled(InstanceUnreachable):
    """The instance took a request, but made no token of any for `pool.request_timeout_s`, or its engine has died."""


class InstanceTooSlow(InstanceError):
    """The instance made no token of a request for `pool.request_timeout_s`, though it makes tokens for others."""


class InstanceRefused(InstanceError):
    """The instance answered with an error status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NeedsWeights(InstanceRefused):
    """The instance runs, but an update of its weights broke; a whole one puts it back into service."""


class BrokenAnswer(InstanceError):
    """The instance answered with what is no sample of what was asked for: too many tokens, too few, or log-probs that
    are no numbers. It must not serve until the next publish."""


class StaleWeights(InstanceError):
    """The instance answered with tokens sampled from another weight version than the one asked for."""


class InstanceRestarted(StaleWeights):
    """Another process answers under the instance's address than the one that was put in service."""

    def __init__(self, message: str, boot_id: str) -> None:
        super().__init__(message)
        self.boot_id = boot_id


class PromptFailed(InstanceError):
    """Instance after instance failed at the same prompt; they stay in service, the run ends with the prompt's name."""


class NoAnswer(AsyncRLError):
    """A server gave no whole answer to a program that asked it; the text says why."""


class UnknownInstance(AsyncRLError):
    """The fleet has no instance of that name or URL."""


class NoInstanceLeft(AsyncRLError):
    """Every instance is out of service, and none came back within `pool.timeout_s`."""


class PublishError(AsyncRLError):
    """The weights of an iteration could not be moved to any instance."""


class RewardError(AsyncRLError):
    """A reward raised, hung, or returned something other than one finite float per response."""


class RolloutLost(AsyncRLError):
    """The rollout of a prompt ended without a group and without an error: it was cancelled from beside."""


class EventLoopLost(AsyncRLError):
    """The thread that makes rollouts ended, or something on it was ended by what runs beside it."""


class WriteFailed(AsyncRLError):
    """A file of a run cannot be written; the message names it, what the system says, and the remedy."""


class WaitTimedOut(AsyncRLError, TimeoutError):
    """Something that was told to end did not within its time; the message names it."""


class RunStopped(AsyncRLError):
    """The run was told to end before it was done, by SIGTERM to any of its training ranks."""


class LeaderFailed(AsyncRLError):
    """The training rank that makes a replica's rollouts failed; raised on the replica's other ranks."""


class ProcessFailed(AsyncRLError):
    """A process of a local deployment ended before its work was done; `cause` is its own named error, if it had one."""

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause
