"""The engine under audit, over HTTP: its answers as samples, and its tokens of a text. Nothing here needs torch.

Three routes are known, and tried in this order: vLLM's `/inference/v1/generate`, OpenAI's `/v1/completions` where it
answers with token ids, and SGLang's `/generate`. Requests ask for one response each, as many short ones as there are to
be, so that a balancer spreads them over its workers; `Engine.timeout_s` limits each of them.
"""

import math
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from async_rl.errors import BrokenAnswer, InstanceRefused, InstanceUnreachable, NoAnswer
from async_rl.shared.net.http_client import HttpClient, HttpResponse
from async_rl.shared.programs.error_text import one_line
from async_rl.shared.protocol import routes
from async_rl.shared.protocol.body import Body
from async_rl.shared.protocol.inference import GenerateRequest, GenerateResponse, SamplingParams

T = TypeVar("T")

NUM_AT_ONCE = 48
"""Requests under way: as many responses as an audit asks for; an engine reads its weights once for all of a step."""

SGLANG_GENERATE = "/generate"
TOKENIZE = "/tokenize"
NO_ROUTE = (404, 405, 501)
BUSY = (429, 503)
BUSY_PAUSE_S = 0.5
"""Until a request is sent again; limits are often of requests per second."""
AS_ID = "token_id:"
"""Before the id of a token in OpenAI's log-probs, with `return_tokens_as_token_ids`."""

QUOTED = 200
"""Characters of an answer that an error shows."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One response: to which prompt, of how many tokens at most, and whether an end token ends it."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    ignores_end: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """A response with the log-probs that the engine reported, in nats."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    finish_reason: str | None

    def cut(self, num_tokens: int) -> "Sample":
        """Its first tokens."""
        return replace(self, tokens=self.tokens[:num_tokens], logprobs=self.logprobs[:num_tokens])


class _CompletionRequest(BaseModel):
    prompt: list[int] | str
    model: str | None
    max_tokens: int
    temperature: float
    logprobs: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = True
    return_token_ids: bool = True
    return_tokens_as_token_ids: bool = True


class _CompletionLogprobs(Body):
    tokens: list[str]
    token_logprobs: list[float | None]


class _CompletionChoice(Body):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _CompletionLogprobs | None = None


class _Completion(Body):
    choices: list[_CompletionChoice] = Field(min_length=1)


class _SglangRequest(BaseModel):
    input_ids: list[int]
    sampling_params: dict[str, Any]
    return_logprob: bool = True


class _SglangMeta(Body):
    """Of each token (log-prob, id, text or null)."""

    output_token_logprobs: list[list[float | str | None]] | None = None
    finish_reason: dict[str, Any] | None = None


class _SglangAnswer(Body):
    meta_info: _SglangMeta


class _TokenizeRequest(BaseModel):
    model: str | None
    messages: list[dict[str, str]]
    add_generation_prompt: bool = True


class _Tokens(Body):
    tokens: list[int]


class _Card(Body):
    id: str
    max_model_len: int | None = None


class _Cards(Body):
    data: list[_Card]


Tokens = tuple[Sequence[int], Sequence[float | None], str | None]
"""(ids, log-probs, why it ended) of one response."""


@dataclass(frozen=True, slots=True)
class _Route:
    path: str
    body: Callable[[Ask, str | None], BaseModel]
    read: Callable[[bytes], Tokens | None]
    """None where the answer has no token ids or no log-probs. Raises ValueError for another answer."""


class Engine:
    """Answers of the server at `url`; to be used once `find` has found its route.

    Args:
        model: the name that requests carry; None for the first that the server lists.
    """

    def __init__(self, url: str, timeout_s: float, token: str | None = None, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._client = HttpClient(self.url, timeout_s, token)
        self._timeout_s = timeout_s
        self._model = model
        self._route: _Route | None = None
        self.max_length: int | None = None
        """Tokens of prompt and response, if the server says it."""

    @property
    def route(self) -> str:
        assert self._route is not None, "find it first"
        return self._route.path

    def find(self, prompt: Sequence[int]) -> None:
        """Finds the route that answers with token ids and log-probs.

        Raises:
            InstanceUnreachable: there is no server, or it does not answer in time.
            InstanceRefused: it refuses the request on the routes that it has.
            BrokenAnswer: none of its routes gives token ids with log-probs.
        """
        self._read_cards()
        ask = Ask(tuple(prompt), 2)
        seen = []
        for route in ROUTES:
            answer = self._send(route.path, route.body(ask, self._model))
            if answer.status in NO_ROUTE:
                seen.append(f"{route.path} answers {answer.status}")
                continue
            self._require_success(route.path, answer)
            if self._read(route, answer.body) is not None:
                self._route = route
                return
            seen.append(f"{route.path} answers without token ids or log-probs")
        raise BrokenAnswer(
            f"{self.url} has no route that gives token ids with their log-probs: {'; '.join(seen)}; expected "
            f"{', '.join(route.path for route in ROUTES)}: start vLLM 0.32 or later with its generate route, an engine "
            "whose completions know return_token_ids, or SGLang"
        )

    def ask(self, asks: Sequence[Ask]) -> list[Sample]:
        """Responses in the order of `asks`.

        Raises:
            InstanceUnreachable: the server is gone, or one answer did not come in time.
            InstanceRefused: it refused a request.
            BrokenAnswer: an answer is no valid response to its request.
        """
        threads = ThreadPoolExecutor(NUM_AT_ONCE)
        try:
            made = [threads.submit(self._sample, ask) for ask in asks]
            for future in as_completed(made):
                future.result()
            return [future.result() for future in made]
        finally:
            # After an error the answers to others, or to Ctrl-C, are not waited for.
            threads.shutdown(wait=False, cancel_futures=True)

    def tokens_of(self, text: str) -> list[int] | None:
        """How the engine divides a text into tokens; None where its completions do not say it."""
        body = _CompletionRequest(prompt=text, model=self._model, max_tokens=1, temperature=1.0)
        answer = self._send(routes.COMPLETIONS, body)
        if not answer.is_success:
            return None
        found = self._valid(routes.COMPLETIONS, partial(_Completion.model_validate_json, answer.body), answer.body)
        return found.choices[0].prompt_token_ids

    def tokens_of_chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """How the engine renders messages, by vLLM's /tokenize; None without that route."""
        answer = self._send(TOKENIZE, _TokenizeRequest(model=self._model, messages=list(messages)))
        if not answer.is_success:
            return None
        return self._valid(TOKENIZE, partial(_Tokens.model_validate_json, answer.body), answer.body).tokens

    def _read_cards(self) -> None:
        try:
            answer = self._client.get(routes.MODELS)
        except NoAnswer as error:
            raise self._unreachable(routes.MODELS, error) from error
        if answer.status in NO_ROUTE:
            return
        self._require_success(routes.MODELS, answer)
        cards = self._valid(routes.MODELS, partial(_Cards.model_validate_json, answer.body), answer.body).data
        if cards:
            self.max_length = next((card.max_model_len for card in cards if card.max_model_len), None)
            self._model = self._model or cards[0].id

    def _sample(self, ask: Ask) -> Sample:
        assert self._route is not None, "find it first"
        answer = self._send(self._route.path, self._route.body(ask, self._model))
        self._require_success(self._route.path, answer)
        found = self._read(self._route, answer.body)
        if found is None:
            raise BrokenAnswer(f"{self.url}{self.route} answers without token ids or log-probs, and gave them before")
        tokens, logprobs, reason = found
        self._require_valid(ask, tokens, logprobs, reason)
        numbers = [float(logprob) for logprob in logprobs if logprob is not None]
        return Sample(ask.prompt, tuple(tokens), tuple(numbers), ask.temperature, reason)

    def _require_valid(
        self, ask: Ask, tokens: Sequence[int], logprobs: Sequence[float | None], reason: str | None
    ) -> None:
        named = f"{self.url}{self.route} answers a request for {ask.max_tokens} tokens with"
        if reason not in ("stop", "length"):
            raise BrokenAnswer(f"{named} finish_reason {reason!r}: expected 'length' or 'stop'; ask an engine at rest")
        if len(tokens) != len(logprobs):
            raise BrokenAnswer(f"{named} {len(tokens)} token ids and {len(logprobs)} log-probs: expected as many")
        if len(tokens) > ask.max_tokens or (ask.ignores_end and len(tokens) < ask.max_tokens):
            raise BrokenAnswer(
                f"{named} {len(tokens)}: expected {ask.max_tokens}, with ignore_eos = {ask.ignores_end}; look at its "
                "limits of a response and of a sequence"
            )
        bad = [each for each in logprobs if each is None or not math.isfinite(each)]
        if bad:
            raise BrokenAnswer(f"{named} a log-prob of {bad[0]}: expected finite ones; look at its weights and dtype")
        if negative := [token for token in tokens if token < 0]:
            raise BrokenAnswer(f"{named} the token id {negative[0]}: expected ids from 0")

    def _send(self, path: str, body: BaseModel) -> HttpResponse:
        deadline = time.monotonic() + self._timeout_s
        try:
            while (answer := self._client.post(path, body)).status in BUSY and time.monotonic() < deadline:
                time.sleep(BUSY_PAUSE_S)
            return answer
        except NoAnswer as error:
            raise self._unreachable(path, error) from error

    def _unreachable(self, path: str, error: NoAnswer) -> InstanceUnreachable:
        return InstanceUnreachable(
            f"{self.url}{path} gave no answer within {self._timeout_s:g} s: {error}; check --engine, and that "
            "the engine is up, or raise --timeout-s; SSL_CERT_FILE names an https authority of your own"
        )

    def _require_success(self, path: str, answer: HttpResponse) -> None:
        if not answer.is_success:
            raise InstanceRefused(
                f"{self.url}{path} answers {answer.status} {answer.reason}: {_quoted(answer.body)}; expected 200 (a "
                "token is read from ASYNC_RL_TOKEN, the model's name from --model)",
                answer.status,
            )

    def _read(self, route: _Route, body: bytes) -> Tokens | None:
        return self._valid(route.path, partial(route.read, body), body)

    def _valid(self, path: str, read: Callable[[], T], body: bytes) -> T:
        try:
            return read()
        except ValueError as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
            raise BrokenAnswer(
                f"{self.url}{path} answers with something else than its route's body ({one_line(why)}): "
                f"{_quoted(body)}; check that --engine is an inference server"
            ) from error


def _quoted(body: bytes) -> str:
    return repr(one_line(body[:QUOTED].decode(errors="replace")))


def _generate_body(ask: Ask, model: str | None) -> BaseModel:
    params = SamplingParams(
        max_tokens=ask.max_tokens, temperature=ask.temperature, ignore_eos=ask.ignores_end, logprobs=0
    )
    # vLLM refuses a request without an id where the field is null.
    name = f"audit-{uuid.uuid4().hex}"
    return GenerateRequest(token_ids=list(ask.prompt), sampling_params=params, model=model, request_id=name)


def _read_generate(body: bytes) -> Tokens | None:
    choice = _only(GenerateResponse.model_validate_json(body).choices)
    content = None if choice.logprobs is None else choice.logprobs.content
    if choice.token_ids is None or content is None:
        return None
    if [each.token_id for each in content] != choice.token_ids:
        raise ValueError("token_ids and logprobs are of different tokens")
    return choice.token_ids, [each.logprob for each in content], choice.finish_reason


def _completion_body(ask: Ask, model: str | None) -> BaseModel:
    return _CompletionRequest(
        prompt=list(ask.prompt),
        model=model,
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        ignore_eos=ask.ignores_end,
    )


def _read_completion(body: bytes) -> Tokens | None:
    choice = _only(_Completion.model_validate_json(body).choices)
    if choice.logprobs is None:
        return None
    tokens = choice.token_ids
    if tokens is None and all(name.startswith(AS_ID) for name in choice.logprobs.tokens):
        tokens = [int(name.removeprefix(AS_ID)) for name in choice.logprobs.tokens]
    return None if tokens is None else (tokens, choice.logprobs.token_logprobs, choice.finish_reason)


def _sglang_body(ask: Ask, model: str | None) -> BaseModel:
    params = {
        "max_new_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "ignore_eos": ask.ignores_end,
    }
    return _SglangRequest(input_ids=list(ask.prompt), sampling_params=params)


def _read_sglang(body: bytes) -> Tokens | None:
    meta = _SglangAnswer.model_validate_json(body).meta_info
    if meta.output_token_logprobs is None:
        return None
    tokens, logprobs = [], []
    for logprob, token, *_ in meta.output_token_logprobs:
        if not isinstance(token, int | float) or isinstance(logprob, str) or token != int(token):
            raise ValueError(f"output_token_logprobs has {logprob!r}, {token!r}: expected a log-prob and a token id")
        tokens.append(int(token))
        logprobs.append(logprob)
    reason = (meta.finish_reason or {}).get("type")
    return tokens, logprobs, reason if isinstance(reason, str) else None


def _only(choices: Sequence[T]) -> T:
    if len(choices) != 1:
        raise ValueError(f"{len(choices)} choices: expected 1")
    return choices[0]


ROUTES = (
    _Route(routes.GENERATE, _generate_body, _read_generate),
    _Route(routes.COMPLETIONS, _completion_body, _read_completion),
    _Route(SGLANG_GENERATE, _sglang_body, _read_sglang),
)


def tokens_in(samples: Iterable[Sample]) -> int:
    return sum(len(sample.tokens) for sample in samples)
