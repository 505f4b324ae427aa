"""The environment variables of processes that run agents; for `gateway` and `environments`."""

import os

from async_rl.config.cluster_section import TOKEN_VARIABLE

OWN_VARIABLES = (TOKEN_VARIABLE, "PYTHONSAFEPATH")
"""Agents do not get these: the token of the run's servers, and what our programs run with."""


def agent_environment(*hosts: str) -> dict[str, str]:
    """The variables of this process, without our own; `hosts` are reached directly, whatever proxy leads elsewhere."""
    environment = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    direct = {name: ",".join(filter(None, [environment.get(name), *hosts])) for name in ("NO_PROXY", "no_proxy")}
    return {**environment, **direct}
