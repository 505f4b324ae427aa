"""One choice of `/v1/completions`, as a whole or in deltas of a stream."""

from collections.abc import Sequence
from typing import Final

from inference_service.api.requests import CompletionChoice, CompletionLogprobs, CompletionRequest
from inference_service.api.responses import LOWEST_LOGPROB, TextCodec
from inference_service.engine_interface import Choice, Sample

UNFINISHED: Final = "\ufffd"
"""What a tokenizer returns for bytes that are not a whole character yet."""


class GrowingText:
    """Concatenated, the pieces are the text of all tokens.

    A token's text may depend on its neighbours, so a piece is what the new tokens add to the text of the previous
    piece: `_ids` holds the tokens of both, of which the first `_num_shown` have been shown. Tokens without text, such
    as special ones, do not count as the previous piece: a tokenizer treats the text after them like the beginning of a
    text.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._num_shown = 0

    def add(self, token_ids: list[int], last: bool) -> str:
        """The text of these tokens; text that ends within a character is held back, unless `last`."""
        self._ids += token_ids
        shown = self._codec.decode(self._ids[: self._num_shown], skip_special_tokens=True)
        text = self._codec.decode(self._ids, skip_special_tokens=True)
        if text.endswith(UNFINISHED) and not last:
            return ""
        piece = text[len(shown) :]
        if piece:
            self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        return piece


class CompletionFormatter:
    """Formats the deltas of choice `index`; without a `codec`, the model's tokenizer, there is no text."""

    def __init__(self, index: int, body: CompletionRequest, prompt: Sequence[int], codec: TextCodec | None) -> None:
        self._index = index
        self._body = body
        self._prompt: Sequence[int] | None = prompt if body.return_token_ids else None
        self._echoed = prompt if body.echo else ()
        self._codec = codec
        self._text = None if codec is None else GrowingText(codec)
        self._text_offset = 0

    def format(self, choice: Choice) -> CompletionChoice:
        """`choice` is the next delta, or the whole; the first contains the prompt, if token ids are requested."""
        token_ids = [sample.token_id for sample in choice.samples]
        text = "" if self._text is None else self._text.add(token_ids, choice.finish_reason is not None)
        if self._echoed and self._codec is not None:
            text = self._codec.decode(self._echoed, skip_special_tokens=True) + text
        prompt, self._prompt = self._prompt, None
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=None if self._body.logprobs is None else self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=token_ids if self._body.return_token_ids else None,
            prompt_token_ids=None if prompt is None else list(prompt),
        )

    def _logprobs(self, choice: Choice) -> CompletionLogprobs:
        samples: list[Sample | None] = [*choice.samples]
        tokens = [self._token(sample.token_id) for sample in choice.samples]
        if self._echoed:
            # Nothing says how likely the first token is.
            samples = [None, *choice.prompt_samples, *choice.samples]
            tokens = [self._token(token_id) for token_id in self._echoed] + tokens
        offsets = [self._text_offset]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        self._text_offset = offsets.pop()
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None if sample is None else sample.logprob for sample in samples],
            tokens=tokens,
            top_logprobs=[
                None
                if sample is None
                else {self._token(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob, _ in sample.top}
                or {token: sample.logprob}
                for token, sample in zip(tokens, samples, strict=True)
            ],
        )

    def _token(self, token_id: int) -> str:
        if self._body.return_tokens_as_token_ids or self._codec is None:
            return f"token_id:{token_id}"
        return self._codec.decode([token_id], skip_special_tokens=False)
