"""The control calls of a weight update, as `InstanceClient.in_order` carries them out."""

from typing import Final, Literal

from async_rl.method.types import WeightVersion
from async_rl.rollouts.instance.dialect import Dialect
from async_rl.shared.protocol import inference, routes
from async_rl.shared.protocol.sequence import Call

IS_AWAKE: Final = Call(method="GET", path=routes.IS_SLEEPING, expected={"is_sleeping": False}, may_be_refused=True)
"""One that can neither sleep nor pause lacks the route."""

PAUSE: Final = Call(path=f"{routes.PAUSE}?mode=wait&clear_cache=true")
"""Lets running requests finish, holds new ones back and empties the KV and prefix caches."""

START: Final = Call(
    path=routes.START_WEIGHT_UPDATE, body=inference.StartUpdateRequest().model_dump_json(), may_be_refused=True
)
"""Refused where an update was left open by an earlier attempt or trainer: a stream that carries every tensor may
continue it."""

RESUME: Final = Call(path=routes.RESUME)


def wake_up(tag: Literal["weights", "kv_cache"]) -> Call:
    """Takes memory for weights, which are to be received before it serves, or for keys and values."""
    return Call(path=f"{routes.WAKE_UP}?tags={tag}")


def update(info: inference.UpdateInfo) -> Call:
    """Answered when all tensors have been received; the sender bounds the time of a broadcast."""
    return Call(path=routes.UPDATE_WEIGHTS, body=inference.UpdateRequest(update_info=info).model_dump_json())


def has_fingerprint(fingerprint: str) -> Call:
    """Whether that is the fingerprint of what each worker last received."""
    return _ask_workers(routes.FINGERPRINT_METHOD, expected=fingerprint)


def finish(dialect: Dialect, version: WeightVersion) -> list[Call]:
    """Ends an update, whose weights are `version` from then on."""
    if dialect.keeps_version:
        body = inference.FinishUpdateRequest(weight_version=version).model_dump_json()
        return [Call(path=routes.FINISH_WEIGHT_UPDATE, body=body)]
    return [Call(path=routes.FINISH_WEIGHT_UPDATE), _ask_workers(routes.NOTE_VERSION_METHOD, version)]


def has_version(dialect: Dialect, version: WeightVersion) -> Call:
    """Whether it holds that version."""
    if dialect.keeps_version:
        return Call(method="GET", path=routes.WEIGHT_INFO, expected={"weight_version": version})
    return _ask_workers(routes.NOTED_VERSION_METHOD, expected=version)


def _ask_workers(method: str, *args: str, expected: str | None = None) -> Call:
    body = inference.RpcRequest(method=method, args=list(args)).model_dump_json()
    return Call(path=routes.COLLECTIVE_RPC, body=body, expected=None if expected is None else {"results": expected})
