"""Faults of a run. Bad input from a user is a `ConfigError` (a ValueError); our own mistakes are assertions.

AsyncRLError
├── ConfigError (also ValueError)   a setting, model or dataset that cannot work
├── OnPolicyViolation               the batch's proof does not hold: no optimizer step is taken
├── NonFiniteGradient               the batch's gradient is infinite or not a number: no optimizer step is taken
├── InstanceError                   one inference instance failed a call
│   ├── InstanceUnreachable         no connection, or it broke, or timed out
│   ├── InstanceTooSlow             it did not finish a request in time, but it makes tokens
│   ├── InstanceRefused             it answered with an error status
│   └── StaleWeights                it answered with tokens of another weight version
├── UnknownInstance                 the fleet has no instance of that name
├── NoInstanceLeft                  every instance is out of service, for longer than pool.timeout_s
├── PublishError                    weights could not be moved to any instance
├── RewardError                     a reward raised, hung or returned something else than one float per response
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
    """The gradient of a batch has an infinity or NaN: no optimizer step was taken."""


class InstanceError(AsyncRLError):
    """One inference instance failed a call; the pool tries another one."""


class InstanceUnreachable(InstanceError):
    """No connection to the instance, or the connection broke, or the call took longer than its timeout."""


class InstanceTooSlow(InstanceError):
    """The instance did not finish a request within its timeout, though it makes tokens, for this request or others."""


class InstanceRefused(InstanceError):
    """The instance answered with an error status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class StaleWeights(InstanceError):
    """The instance answered with tokens sampled from another weight version than the one asked for."""


class UnknownInstance(AsyncRLError):
    """The fleet has no instance of that name or URL."""


class NoInstanceLeft(AsyncRLError):
    """Every instance is out of service, and none came back within `pool.timeout_s`."""


class PublishError(AsyncRLError):
    """The weights of an iteration could not be moved to any instance."""


class RewardError(AsyncRLError):
    """A reward raised, hung, or returned something other than one finite float per response."""


class LeaderFailed(AsyncRLError):
    """The training rank that makes a replica's rollouts failed; raised on the replica's other ranks."""


class ProcessFailed(AsyncRLError):
    """A process of a local deployment ended before its work was done."""
