"""Differences between the servers that implement the protocol, selected by what they report about themselves.

`GET /version` distinguishes vLLM's releases; the embedded engine reports the release whose dialect it implements, and
is recognised by the owner of its model card.
"""

import re
from dataclasses import dataclass

from async_rl.protocol import routes


@dataclass(frozen=True, slots=True)
class Dialect:
    """How to call one server.

    `has_generate`: serves /inference/v1/generate with all n choices and their weight versions; otherwise completions.
    `keeps_version`: has the /weight_info route; otherwise its workers store the version for us.
    `noise_by_position`: the noise of a token is a function of (seed, index in prompt plus response), so a response
    continued under the same seed gets exactly the tokens it would have got. Other servers are sent no seeds: vLLM
    samples row by row with seeds, its results depend on the batch all the same, and 0.32 on CPU crashes with them when
    a prompt is computed in several parts.
    `holds_what_it_received`: its fingerprint is computed from the memory it computes with. In other servers a loader is
    in between, and only log-probs show how it loaded the tensors.
    """

    name: str
    has_generate: bool
    keeps_version: bool
    noise_by_position: bool
    holds_what_it_received: bool


EMBEDDED = Dialect("embedded", True, True, True, True)
VLLM = Dialect("vllm", True, True, False, False)
"""vLLM since the release that keeps weight versions."""
VLLM_WITHOUT_VERSIONS = Dialect("vllm without weight versions", False, False, False, False)
"""vLLM 0.23, which vllm-ascend 0.23 builds on."""

DEAD_ENGINE = "EngineCore encountered an issue"
"""The start of vLLM's message after its engine process died, which its server outlives for a while."""

FIRST_WITH_VERSIONS = (0, 32)
"""The oldest release in which weight versions were found; releases between 0.23 and it were not examined."""


def dialect_of(version: str, owned_by: str | None) -> Dialect:
    """The dialect of a server with this `/version` and owner of the first model card; unknown versions count as new."""
    if owned_by == routes.OWNED_BY_EMBEDDED:
        return EMBEDDED
    numbers = re.match(r"(\d+)\.(\d+)", version)
    old = numbers is not None and (int(numbers[1]), int(numbers[2])) < FIRST_WITH_VERSIONS
    return VLLM_WITHOUT_VERSIONS if old else VLLM
