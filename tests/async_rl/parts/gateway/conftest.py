import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from async_rl.shared.event_loop import EventLoopThread
from tests.support.gateway_rig import GatewayRig, gateway_rig

# The SDK sends it along. It is asked for here, since that starts a process, the first time.
platform.processor()


@pytest.fixture
def rigs(loop: EventLoopThread) -> Iterator[Callable[..., GatewayRig]]:
    """`rigs(say, max_turns=2)` starts a gateway to a policy that says what `say(context, seed)` returns."""
    with ExitStack() as stack:
        yield lambda say, **settings: stack.enter_context(gateway_rig(loop, say, **settings))
