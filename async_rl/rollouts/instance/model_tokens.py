"""Which tokens a response of the model may have, and which of them end it; asked of every response that arrives."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.shared.protocol.inference import SamplingParams
from async_rl.shared.protocol.routed_experts import RouteShape


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """Of the model in training.

    `end_token_ids`: see `async_rl.shared.end_tokens`. `text_of`: of token ids, with or without special tokens.
    `routes`: of a model with experts.
    """

    vocab_size: int
    end_token_ids: tuple[int, ...]
    text_of: Callable[[Sequence[int], bool], str]
    routes: RouteShape | None = None

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


NO_VOCABULARY = 2**31
"""More than any token of an unknown model."""

FEW_ENDS = 8
"""So many comparisons with one token are faster than one search for all of them."""


class SampledTokens:
    """What the tokens of the responses to one request must be like; without a `model` only what the request says."""

    def __init__(self, model: ModelTokens | None, sampling: SamplingParams) -> None:
        self._model = model
        self._ends = frozenset(sampling.stop_token_ids)
        self._end_N = np.array(sorted(self._ends), np.int64)
        self._stop = sampling.stop
        self._end = NO_VOCABULARY if model is None else model.vocab_size

    def are_plain(self, tokens: memoryview) -> bool:
        """Whether int32 tokens, of any responses, are the model's, and none of them ends one."""
        token_N = np.frombuffer(tokens, np.int32)
        if not len(token_N):
            return True
        if not 0 <= token_N.min() <= token_N.max() < self._end:
            return False
        if len(self._end_N) > FEW_ENDS:
            return not np.isin(token_N, self._end_N).any()
        return not any((token_N == end).any() for end in self._end_N)

    def has_ended(self, token_ids: "array[int]") -> bool:
        """Whether the last of these tokens ends a response."""
        return bool(token_ids) and token_ids[-1] in self._ends

    def fault_of(self, last: "array[int]", new: "array[int]") -> str | None:
        """What is wrong with `new` tokens after the `last` one, if there is one."""
        if not new:
            return None
        # Lists are read twice as fast as arrays, whose values become objects each time.
        values = new.tolist()
        lowest, highest = min(values), max(values)
        if lowest < 0 or highest >= self._end:
            outside = lowest if lowest < 0 else highest
            return f"token {outside}, but the model's tokens are 0 to {self._end - 1}"
        if self._ends.isdisjoint(values) and not self.has_ended(last):
            return None
        after_end = next((token for token in (*last, *values[:-1]) if token in self._ends), None)
        return None if after_end is None else f"tokens after {after_end}, which ends a response"

    def fault_of_end(self, token_ids: Sequence[int]) -> str | None:
        """What is wrong with a response that ended before its last possible token."""
        if self._model is None or token_ids[-1] in self._ends or self._model.has_stop_text(token_ids, self._stop):
            return None
        ends = ", ".join(map(str, sorted(self._ends))) or "none"
        return f"finish_reason 'stop' after token {token_ids[-1]}, though only these end a response: tokens {ends}" + (
            f", texts {list(self._stop)}" if self._stop else ""
        )
