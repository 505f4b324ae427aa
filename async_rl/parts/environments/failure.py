"""How an environment fails; for all adapters."""


class EnvironmentFailed(Exception):
    """The environment does not respond, refuses, or responds with something else; the rollout is run again."""
