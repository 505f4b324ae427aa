"""Responses of which only the text matters."""

from async_rl.types import Response, WeightSpan


def response(text: str) -> Response:
    return Response(
        token_ids=(5, 6),
        logprobs=(-0.1, -0.2),
        text=text,
        finish_reason="stop",
        weight_spans=(WeightSpan("v1", 0, 2),),
        instance="http://i",
    )
