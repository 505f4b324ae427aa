"""Request and response bodies of the trainer's fleet endpoint, see `async_rl.rollouts.fleet`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from async_rl.config.texts import matching
from async_rl.shared.protocol.body import BaseUrl, Body, StrictBody
from async_rl.shared.protocol.routes import BOOT_ID

ADDRESS_FILE = "fleet.json"
"""In `run.dir` while the endpoint listens: a `FleetAddress`."""

InstanceState = Literal["joining", "ready", "draining", "stale", "dead"]
"""joining: known, without weights of this run yet; ready: serves the version in training; draining: finishes its
requests, takes no new ones; stale: responds, but has other weights until the next publish; dead: does not respond."""


class FleetAddress(Body):
    """Where a run's fleet endpoint listens, and the run's uid: a trainer that was killed leaves its file behind, and
    the next one at that port may be another run's."""

    url: str
    run: str | None = None


def read_address(run_dir: Path) -> FleetAddress:
    """The address in a run's directory.

    Raises:
        OSError: there is none.
        ValueError: the file is something else.
    """
    try:
        return FleetAddress.model_validate_json((run_dir / ADDRESS_FILE).read_bytes())
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from error


class InstanceInfo(Body):
    """The fleet's information about one instance. `reason`: why it is not ready; while it is, `boot_id` names the
    process that was put in service with `version`."""

    name: str
    url: str
    state: InstanceState
    reason: str | None = None
    version: str | None = None
    boot_id: str | None = None
    outstanding_tokens: int = 0
    num_requests: int = 0
    tokens_per_s: float = 0.0
    num_tokens: int = 0
    num_failures: int = 0


class FleetInfo(Body):
    """GET /fleet."""

    version: str | None = None
    instances: list[InstanceInfo]
    desired_instances: int | None = None


Name = Annotated[str, matching("[A-Za-z0-9_.-]{1,128}", "letters, digits, '_', '.' and '-', 128 at most")]


class RegisterRequest(StrictBody):
    """POST /fleet/register, periodically: the instance at `url` is running. `boot_id` is new with each start of it."""

    url: BaseUrl
    name: Name
    boot_id: Annotated[str, matching(BOOT_ID, "letters, digits and '-', 64 at most")]


class RegisterResponse(Body):
    """`leave`: the instance was drained or removed, and may end. `interval_s`: when to register again."""

    state: InstanceState | None
    leave: bool
    interval_s: float


class AddRequest(StrictBody):
    """POST /fleet/add: an instance that does not register itself; its name is its host and port unless given."""

    url: BaseUrl
    name: Name | None = None


class NameRequest(StrictBody):
    """POST /fleet/drain and /fleet/remove: by name, or by URL."""

    name: str = Field(min_length=1, max_length=2048)
