"""What a stream tells of a response, and when."""

from async_rl.protocol.inference import SamplingParams
from inference_service.engine.sequences import Sequence
from inference_service.engine_interface import Sample

EOS = 1


def sequence(max_tokens: int = 8) -> Sequence:
    """One that streams token by token."""
    made = Sequence((5, 6), SamplingParams(max_tokens=max_tokens, stream_interval=1), 0, frozenset({EOS}))
    made.due_at = 1
    return made


def sample(sequence: Sequence, *token_ids: int) -> None:
    sequence.samples += [Sample(token_id, -1.0, 1, (), "v1") for token_id in token_ids]


def told(sequence: Sequence) -> list[int]:
    return [each.token_id for each in sequence.take_delta().samples]


def test_a_stop_token_is_told_only_with_the_end_of_its_response() -> None:
    response = sequence()
    sample(response, 3, 4, EOS)
    assert response.has_delta and told(response) == [3, 4]
    assert not response.has_delta
    response.end("stop")
    assert response.has_delta
    assert (delta := response.take_delta()).finish_reason == "stop"
    assert [each.token_id for each in delta.samples] == [EOS]
    assert not response.has_delta


def test_the_last_of_max_tokens_is_told_only_with_the_end_of_its_response() -> None:
    response = sequence(max_tokens=2)
    sample(response, 3, 4)
    assert told(response) == [3] and not response.has_delta
    response.end("length")
    assert told(response) == [4]


def test_a_response_of_its_stop_token_alone_has_no_news_before_its_end() -> None:
    response = sequence()
    sample(response, EOS)
    assert not response.has_delta
    response.end("stop")
    assert told(response) == [EOS]
