"""What a request for completions may ask for at once."""

from typing import Any

import pytest
from pydantic import ValidationError

from inference_service.api.generation_routes import _prompts
from inference_service.api.requests import MAX_RESPONSES, CompletionRequest
from inference_service.engine_interface import RequestRefused


@pytest.mark.parametrize("kind", ["ab", [5, 6]], ids=["text", "tokens"])
def test_responses_of_one_request_are_limited_in_number(kind: Any) -> None:
    class Codec:
        def encode(self, text: str) -> list[int]:
            return [ord(character) for character in text]

        def decode(self, token_ids: object, skip_special_tokens: bool) -> str:
            raise NotImplementedError

    def prompts(num: int, n: int) -> list[list[int]]:
        return _prompts(CompletionRequest(prompt=[kind] * num, n=n), Codec())

    assert len(prompts(MAX_RESPONSES, 1)) == MAX_RESPONSES and len(prompts(MAX_RESPONSES // 1024, 1024)) == 16
    for num, n in ((MAX_RESPONSES, 2), (MAX_RESPONSES // 1024 + 1, 1024)):
        with pytest.raises(RequestRefused, match=f"{num * n} responses, expected {MAX_RESPONSES} at most"):
            prompts(num, n)
    with pytest.raises(ValidationError, match=str(MAX_RESPONSES)):
        prompts(MAX_RESPONSES + 1, 1)
