"""What a stream tells of a response, and when."""

from collections.abc import Sequence as Listing

from async_rl.shared.protocol.inference import SamplingParams
from inference_service.engine.sequences import Sequence
from inference_service.engine.stop_texts import StopTexts
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


class Letters:
    def decode(self, token_ids: Listing[int], skip_special_tokens: bool) -> str:
        return "".join("abcdefghij"[token] for token in token_ids)


def test_the_token_that_completes_a_stop_text_is_told_only_with_the_end() -> None:
    response = sequence()
    response.stop_texts = StopTexts(["zz", "cde"], Letters())
    sample(response, 2, 3)
    assert told(response) == [2, 3] and not response.reached_stop()
    sample(response, 4)
    assert response.reached_stop() and not response.has_delta
    response.end("stop")
    assert told(response) == [4]


def test_a_stop_text_may_begin_in_what_is_continued_and_not_in_the_prompt() -> None:
    for num_continued, stops in ((0, False), (1, False), (2, True)):
        made = Sequence((0, 2, 3), SamplingParams(), 0, frozenset(), num_continued, StopTexts(["cde"], Letters()))
        sample(made, 4)
        assert made.reached_stop() == stops
