"""Which tokens a response of the model may have, and which of them end it; asked of every response that arrives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from async_rl.protocol.inference import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """Of the model in training.

    `end_token_ids`: see `async_rl.end_tokens`. `text_of`: of token ids, with or without special tokens.
    """

    vocab_size: int
    end_token_ids: tuple[int, ...]
    text_of: Callable[[Sequence[int], bool], str]

    def completed(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` with the model's end tokens by id: servers know some of them only, and not the same ones."""
        if sampling.ignore_eos:
            return sampling
        ends = dict.fromkeys((*sampling.stop_token_ids, *self.end_token_ids))
        return sampling.model_copy(update={"stop_token_ids": list(ends)})

    def has_stop_text(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the response has one of the texts, as any server may have read it: with special tokens or without,
        and with a space at either end that decoding the response alone leaves out."""
        texts = [self.text_of(token_ids, skip) for skip in (False, True)] if stop else []
        return any(end.strip() in text for end in stop for text in texts)


class SampledTokens:
    """What the tokens of the responses to one request must be like; without a `model` only what the request says."""

    def __init__(self, model: ModelTokens | None, sampling: SamplingParams) -> None:
        self._model = model
        self._ends = frozenset(sampling.stop_token_ids)
        self._stop = sampling.stop

    def fault_of(self, token_ids: Sequence[int], num_before: int) -> str | None:
        """What is wrong with the tokens from `num_before` on."""
        new = token_ids[num_before:]
        if self._model is not None and new and not 0 <= max(new) < self._model.vocab_size:
            return f"token {max(new)}, but the model's tokens are 0 to {self._model.vocab_size - 1}"
        after_end = next((token for token in token_ids[max(0, num_before - 1) : -1] if token in self._ends), None)
        if new and after_end is not None:
            return f"tokens after {after_end}, which ends a response"
        return None

    def fault_of_end(self, token_ids: Sequence[int]) -> str | None:
        """What is wrong with a response that ended before its last possible token."""
        if self._model is None or token_ids[-1] in self._ends or self._model.has_stop_text(token_ids, self._stop):
            return None
        ends = ", ".join(map(str, sorted(self._ends))) or "none"
        return f"finish_reason 'stop' after token {token_ids[-1]}, though only these end a response: tokens {ends}" + (
            f", texts {list(self._stop)}" if self._stop else ""
        )
