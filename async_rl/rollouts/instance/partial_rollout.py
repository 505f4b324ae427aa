"""A response while it is generated: the tokens sampled so far are kept even if the instance is lost."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from async_rl.method.token_arrays import ExpertIds, Logprobs, TokenIds
from async_rl.method.types import Response, WeightSpan
from async_rl.shared.protocol.inference import SamplingParams

MAX_STREAM_INTERVAL, CHUNKS_OF_A_RESPONSE = 64, 8
"""A response arrives in so many chunks at least, of so many tokens at most: each costs the producer time."""


@dataclass(slots=True)
class PartialRollout:
    """One unfinished response; `seed` is its own: the group's seed plus its index in the group."""

    seed: int
    token_ids: "array[int]" = field(default_factory=lambda: array(TokenIds.typecode))
    logprobs: "array[float]" = field(default_factory=lambda: array(Logprobs.typecode))
    spans: list[WeightSpan] = field(default_factory=list)
    finish_reason: str | None = None
    instance: str = ""
    num_continued: int = 0
    num_resampled: int = 0
    routes: "npt.NDArray[np.uint16] | None" = None
    """Of prompt and response but its last token, [rows, layers, k], when it has ended, if they were asked for."""

    def cut(self, length: int) -> None:
        """Drops all tokens from `length` on."""
        if length < len(self.token_ids):
            del self.token_ids[length:], self.logprobs[length:]
            self.spans = [span for span in self.spans if span.end <= length]
            self.finish_reason = self.routes = None

    def response(self, *, has_prompt_routes: bool = False) -> Response:
        """The finished response, with an empty text; with the prompt's routes where these came with it."""
        assert self.finish_reason is not None, "an unfinished partial rollout is no response"
        prompt_routes = routes = None
        if self.routes is not None:
            num_prompt = len(self.routes) - (len(self.token_ids) - 1)
            routes = ExpertIds.of_bytes(self.routes[num_prompt:].data)
            prompt_routes = ExpertIds.of_bytes(self.routes[:num_prompt].data) if has_prompt_routes else None
        return Response(
            token_ids=TokenIds(self.token_ids),
            logprobs=Logprobs(self.logprobs),
            text="",
            finish_reason=self.finish_reason,
            weight_spans=tuple(self.spans),
            instance=self.instance,
            num_continued=self.num_continued,
            num_resampled=self.num_resampled,
            routes=routes,
            prompt_routes=prompt_routes,
        )


def stream_interval(max_tokens: int) -> int:
    """How many tokens of a response arrive at once, and so how many an instance that is lost may take with it."""
    return min(MAX_STREAM_INTERVAL, max(1, max_tokens // CHUNKS_OF_A_RESPONSE))


def request_of(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    partials: Sequence[PartialRollout],
    *,
    noise_by_position: bool,
) -> tuple[list[int], SamplingParams]:
    """Prompt and sampling parameters of the request that continues these partial rollouts.

    Either none of them has a token yet, and their seeds are consecutive, as those of the children of one request are;
    or there is a single one, whose tokens so far become part of the prompt. Seeds are sent if the server's noise is a
    function of seed and position, so that a continuation gets exactly the noise it would have got. For other servers
    they would have no benefit: results depend on the batch too, and a continuation under the same seed would repeat the
    noise that generated the prefix. The same servers are told where the prompt ends, so that they attend to it as to
    the prompt of the other responses, and which responses later turns follow.
    """
    first, length = partials[0], len(partials[0].token_ids)
    sampling = sampling.model_copy(update={"stream_interval": stream_interval(sampling.max_tokens)})
    seed = first.seed if noise_by_position else None
    is_turn = sampling.is_turn if noise_by_position else None
    routed_experts = sampling.routed_experts if noise_by_position else None
    num_continued = (sampling.num_continued or 0) + length or None if noise_by_position else None
    if not length:
        assert [partial.seed for partial in partials] == list(range(first.seed, first.seed + len(partials)))
        update = {"n": len(partials), "seed": seed, "num_continued": num_continued, "is_turn": is_turn}
        return list(prompt_token_ids), sampling.model_copy(update=update | {"routed_experts": routed_experts})
    assert len(partials) == 1, "a continuation is a request of its own"
    rest = {
        "n": 1,
        "max_tokens": sampling.max_tokens - length,
        "min_tokens": max(0, sampling.min_tokens - length),
        "seed": seed,
        "num_continued": num_continued,
        "is_turn": is_turn,
        "routed_experts": routed_experts,
    }
    return [*prompt_token_ids, *first.token_ids], sampling.model_copy(update=rest)
