"""State machine of a weight update in an instance: start, receive any number of streams, finish; or break.

```
SERVING --sleep--> ASLEEP --wake--> BROKEN
SERVING --start--> UPDATING --finish, complete--> SERVING
   ^                  |  \\--finish, nothing received (refused streams change nothing)--> SERVING, an error
   |                  v
   +---start..finish--BROKEN   a stream broke, or finish found tensors missing: old and new weights are mixed;
                               or they were dropped for a sleep
```
Adapters come in a stream of their own, beside which the weights below them stay: they are kept apart until finish puts
them in service, so a stream of them that breaks leaves what was there.

All methods block and are called by the engine's control thread only, while generation is held.
"""

import enum

import torch

from async_rl.errors import AsyncRLError
from async_rl.shared.protocol.inference import AdapterInfo, InitInfo, UpdateInfo
from async_rl.shared.weights.fingerprint import base_digest
from async_rl.shared.weights.swap import Swap
from inference_service.engine_interface import EngineFault, RequestRefused
from inference_service.weight_transfer.adapters import ModelAdapters, ReceivedAdapters
from inference_service.weight_transfer.receiver import WeightReceiver, check_update, parameter_views, specs_of


class Phase(enum.Enum):
    SERVING = "serving"
    UPDATING = "updating"
    BROKEN = "broken"
    ASLEEP = "asleep"


class WeightUpdate:
    """Receives tensors directly into the model's parameters and tracks whether the weights are complete."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._views = parameter_views(model)
        self._swap = Swap(model.parameters())
        self._specs = specs_of(self._views)
        self._receiver = WeightReceiver()
        self._received: set[str] = set()
        self._adapters = ModelAdapters(model)
        self._received_adapters: ReceivedAdapters | None = None
        self._digest: str | None = None
        self._holds: str | None = None
        """Fingerprint of the stream that the weights below adapters were received in; None if they are others."""
        self._touched = False
        self.is_sleeping = self._swap.is_away
        """Whether the weights have left the device."""
        self._phase = Phase.ASLEEP if self.is_sleeping else Phase.SERVING
        self._fault: str | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def fault(self) -> str | None:
        """Why the weights are not complete; None if they are, or during an update."""
        return self._fault

    @property
    def fingerprint(self) -> str | None:
        """Of what was received last: adapters are read where they are, also after they were put in service."""
        if self._received_adapters is not None:
            return self._received_adapters.fingerprint()
        comes_whole = self._phase is Phase.UPDATING and self._touched
        of_adapters = None if comes_whole else self._adapters.fingerprint()
        return of_adapters or self._receiver.fingerprint

    def base_digest(self) -> str | None:
        """Of the weights without adapters; None if they are not complete, or an update of them is still open."""
        is_open = self._phase is Phase.UPDATING and self._touched
        if self.is_sleeping or self._phase in (Phase.BROKEN, Phase.ASLEEP) or is_open:
            return None
        if self._digest is None:
            self._digest = base_digest((self._specs[name], view) for name, view in self._views.items())
        return self._digest

    def sleep(self, *, keeps: bool) -> None:
        """Gives the weights' memory back; with `keeps` their values stay on the host until `wake`.

        Without it an update that is going on ends, as one that a trainer left unfinished when it was lost.

        Raises:
            RequestRefused: an update is going on, and what it has received so far were to be kept.
        """
        if keeps and self._phase is Phase.UPDATING:
            raise RequestRefused("a weight update is going on: finish it before the instance sleeps")
        if keeps and self._phase is Phase.SERVING:
            self._swap.to_host()
        else:
            self._swap.discard()
            self._adapters.remove()
            self._digest = self._holds = None
            self._phase, self._fault = Phase.ASLEEP, None
        self.is_sleeping = True

    def wake(self) -> None:
        """Takes the memory again, if it was given back; weights that were dropped are to be received now.

        Raises:
            EngineFault: there is no room for them; it sleeps on.
        """
        try:
            self._swap.prefetch()
        except torch.OutOfMemoryError as error:
            raise EngineFault(f"there is no room on the device for the weights: {error}") from error
        self.is_sleeping = False
        if self._phase is Phase.ASLEEP:
            self._break("the weights were dropped for a sleep")

    def join(self, info: InitInfo) -> None:
        """Joins a trainer's weight group; ends an update that an earlier trainer left unfinished."""
        if self._phase is Phase.UPDATING:
            if self._touched:
                self._break("a new weight group was opened in the middle of an update")
            else:
                self._phase = Phase.SERVING
        self._receiver.join(info)

    def start(self) -> None:
        if self._phase is Phase.UPDATING:
            raise EngineFault("a weight update is already going on: finish it first")
        if self.is_sleeping:
            raise EngineFault("the instance sleeps, without memory for weights: call /wake_up?tags=weights first")
        # A broken instance stays out of service until finish; weights once changed stay marked as changed.
        self._touched = self._phase is Phase.BROKEN
        self._phase = Phase.UPDATING
        self._received.clear()
        self._received_adapters = None

    def receive(self, update: UpdateInfo) -> None:
        """Checks and receives one stream, from the weight group or from a snapshot, which needs no group.

        Raises:
            RequestRefused: the announced tensors do not fit the model, or the snapshot cannot be read; nothing was
                changed.
            AsyncRLError: no update was started, or the stream broke; after a broken stream the instance is out of
                service until a full update succeeds.
        """
        if self._phase is not Phase.UPDATING:
            raise EngineFault("no weight update is going on: call /start_weight_update first")
        self._received_adapters = None
        if update.adapter is not None:
            self._received_adapters = self._receive_adapters(update, update.adapter)
            return
        specs = check_update(update, self._specs)
        was_touched, self._touched = self._touched, True
        held, self._holds = self._holds, None
        self._digest = None
        try:
            for spec, _ in self._receiver.stream(update, specs, self._views, held):
                self._received.add(spec.name)
        except RequestRefused:
            self._touched, self._holds = was_touched, held
            raise
        except (AsyncRLError, RuntimeError) as error:
            self._break(f"a weight stream broke: {error}")
            raise EngineFault(f"a weight stream broke, the instance is out of service: {error}") from error
        if len(specs) == len(self._specs):
            self._holds = self._receiver.fingerprint

    def finish(self) -> None:
        """Ends the update; afterwards the weights are complete.

        Raises:
            EngineFault: no update was started, or tensors are missing.
        """
        if self._phase is not Phase.UPDATING:
            raise EngineFault("no weight update is going on: call /start_weight_update first")
        adapters, self._received_adapters = self._received_adapters, None
        if not self._touched and adapters is None:
            self._phase = Phase.SERVING
            raise EngineFault("no weights were received since the update started: the old ones stay in service")
        if missing := self._missing():
            reason = f"{len(missing)} of {len(self._specs)} tensors were not received, the first is {missing[0]!r}"
            self._break(f"the weight update is not complete: {reason}")
            raise EngineFault(f"the weight update is not complete, the instance is out of service: {reason}")
        if adapters is not None:
            self._adapters.put(adapters)
        else:
            # Whole weights have what was learned in them.
            self._adapters.remove()
        self._phase = Phase.SERVING
        self._fault = None

    def _receive_adapters(self, update: UpdateInfo, info: AdapterInfo) -> ReceivedAdapters:
        specs = check_update(update, self._adapters.expected(info))
        self._adapters.require_pairs(update.names)
        if (held := self.base_digest()) != info.base:
            raise RequestRefused(
                f"the adapters are for weights with digest {info.base}, this instance has {held}: send those weights "
                "first, or start it with the trainer's model",
                "update_info.adapter.base",
            )
        device = next(iter(self._views.values())).device
        make_fingerprint = type(self._receiver.fingerprint_for(update))
        try:
            # There may be no room for them.
            factors = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs}
            for _ in self._receiver.stream(update, specs, factors):
                pass
        except RequestRefused:
            raise
        except (AsyncRLError, RuntimeError) as error:
            raise EngineFault(f"a stream of adapters broke, and what was there stays: {error}") from error
        return ReceivedAdapters(info, factors, make_fingerprint)

    def _missing(self) -> list[str]:
        """Tensors that are still to be received, once any of them was."""
        return [name for name in self._specs if name not in self._received] if self._touched else []

    def _break(self, reason: str) -> None:
        self._phase = Phase.BROKEN
        self._holds = None
        self._fault = f"{reason}; only a full weight update puts the instance back into service"
