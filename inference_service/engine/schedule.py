"""Which responses run, and what each step computes for them."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Listing
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from inference_service.engine.kv_store import KVStore, NoRoom, Place
from inference_service.engine.segments import Link, Segment, Segments, shortened
from inference_service.engine.sequences import Sequence

MAX_SCORED: Final = 512
"""Tokens of prompts of which a step computes log-probs: each takes a row of logits."""

FREE_MARGIN: Final = 0.15
"""No sequence is started when less than this share of the store is free: running ones grow."""


@dataclass(slots=True, eq=False)
class Run:
    """A sequence in progress: after a shared prompt come its own tokens, which are to be fed to the model."""

    sequence: Sequence
    segment: Segment
    links: tuple[Link, ...]
    num_shared: int
    """Tokens that are in the links."""
    num_fed: int = 0
    place: Place | None = None
    """Of its own tokens, from when the first one is to be fed."""

    @property
    def num_unfed(self) -> int:
        """Own tokens that are still to be fed; 0 while the prompt is being computed."""
        return self.sequence.num_tokens - self.num_shared - self.num_fed

    @property
    def begins_at(self) -> Place:
        """Where the state lies that its next token follows, of a model that has states."""
        return self.place if self.num_fed and self.place is not None else self.segment.place

    def unfed(self, most: int) -> list[int]:
        begin = self.num_shared + self.num_fed
        if self.num_unfed == 1 and self.sequence.samples:
            return [self.sequence.samples[-1].token_id]
        return self.sequence.token_ids()[begin : begin + most]


@dataclass(frozen=True, slots=True)
class Fed:
    """Several tokens of one segment, or of one sequence's own ones, to be computed in one step.

    `draws` are the runs that get their next token from the last one; `scored`, if there is one, gets the log-probs of
    the prompt's tokens after these, `targets`.
    """

    what: Segment | Run
    token_ids: Listing[int]
    draws: Listing[Run]
    scored: Sequence | None = None
    targets: Listing[int] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """One step: `decoding` runs feed one token each, and get the next one."""

    decoding: Listing[Run]
    fed: Listing[Fed]


class Schedule:
    """Sequences in the order of their arrival, at most `max_running` at once. Used by one thread at a time."""

    def __init__(self, store: KVStore, max_running: int, prefill_tokens: int, exact: bool = False) -> None:
        """`exact`: a token attends to its prompt and its response as in the trainer: as two parts, each whole."""
        self._exact = exact
        self.running: list[Run] = []
        self._store = store
        self._segments = Segments(store, chains=not exact)
        self._waiting: deque[Sequence] = deque()
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self.num_asked = 0
        """Prompt tokens of the sequences that were started."""
        self.num_known = 0
        """Those of them that were computed already, or for another sequence."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    def add(self, sequences: Iterable[Sequence]) -> None:
        self._waiting.extend(sequences)

    def keep(self, live: Collection[Sequence]) -> None:
        """Drops the sequences that are not among these."""
        for run in [run for run in self.running if run.sequence not in live]:
            self.end(run)
        if any(sequence not in live for sequence in self._waiting):
            self._waiting = deque(sequence for sequence in self._waiting if sequence in live)

    def end(self, run: Run) -> None:
        self.running.remove(run)
        if run.place is not None:
            self._store.free(run.place)
        self._segments.give_back(run.segment)

    def finish(self, run: Run) -> None:
        """Ends a run whose response is complete; what a turn has computed is kept for the turn that follows it."""
        if run.sequence.params.is_turn and not self._exact and run.place is not None:
            token_ids = run.sequence.token_ids()[: run.num_shared + run.num_fed]
            rows = range(len(run.segment.prompt) - run.num_shared, run.num_fed)
            with suppress(NoRoom):
                self._segments.keep(run.segment, np.array(token_ids, dtype=np.int64), run.place, rows)
        self.end(run)

    def restart(self) -> None:
        """Forgets all keys and values: every sequence is computed anew."""
        self._waiting.extendleft(run.sequence for run in reversed(self.running))
        self.running.clear()
        self._segments.clear()
        self._store.clear()

    def next(self) -> Work:
        """What to compute now; starts waiting sequences, and puts running ones back if the store is full."""
        self._start_waiting()
        self._make_room()
        decoding = [run for run in self.running if run.num_unfed == 1 and run.segment.is_done]
        return Work(decoding, list(self._to_feed()))

    def _to_feed(self) -> Iterator[Fed]:
        budget = self._prefill_tokens
        scored_of = {run.segment: run.sequence for run in self.running if run.sequence.scores_prompt}
        scored_budget = MAX_SCORED
        for segment in self._segments.unfinished():
            if budget <= 0:
                return
            begin = segment.num_before + segment.num_done
            scored = scored_of.get(segment)
            most = budget if scored is None else min(budget, scored_budget)
            if not most:
                continue
            token_ids = segment.prompt[begin : begin + most].tolist()
            budget -= len(token_ids)
            targets: Listing[int] = ()
            if scored is not None:
                scored_budget -= len(token_ids)
                targets = scored.prompt[begin + 1 : begin + 1 + len(token_ids)]
            ends = segment.num_done + len(token_ids) == len(segment)
            draws = [run for run in self.running if run.segment is segment and not run.num_unfed] if ends else []
            yield Fed(segment, token_ids, draws, scored, targets)
        for run in self.running:
            if budget <= 0:
                return
            if run.num_unfed > 1 and run.segment.is_done:
                token_ids = run.unfed(budget)
                budget -= len(token_ids)
                yield Fed(run, token_ids, [run] if len(token_ids) == run.num_unfed else [])

    def _start_waiting(self) -> None:
        while self._waiting and len(self.running) < self._max_running:
            try:
                self._require_margin()
                self.running.append(self._start(self._waiting[0]))
            except NoRoom:
                if not self._segments.evict():
                    if not self.running:
                        raise
                    return
            else:
                self._waiting.popleft()

    def _require_margin(self) -> None:
        if self.running and self._store.num_tokens > (1.0 - FREE_MARGIN) * self._store.max_tokens:
            raise NoRoom

    def _start(self, sequence: Sequence) -> Run:
        # Where the trainer's order does not matter, a later turn shares all that is before it.
        follows_prompt = self._exact or not sequence.params.is_turn
        num_shared = len(sequence.prompt) - (sequence.num_continued if follows_prompt else 0)
        if self._store.has_states:
            # A state cannot go back by the token that is computed once more: it is each response's own.
            num_shared -= 1
        sequence.prompt_samples.clear()
        segment = self._segments.acquire(sequence.prompt[:num_shared], shared=not sequence.scores_prompt)
        if not sequence.samples:
            self.num_asked += len(sequence.prompt)
            self.num_known += num_shared - (len(segment) - segment.num_done if segment.num_runs == 1 else 0)
        if segment.is_done and num_shared == sequence.num_tokens:
            # Its logits are gone: the last token of the prompt is computed once more.
            if self._exact:
                segment.num_done -= 1
            else:
                num_shared -= 1
        return Run(sequence, segment, shortened(segment.links, num_shared), num_shared)

    def _make_room(self) -> None:
        """Room for the tokens that running sequences feed; the last ones wait again if there is none."""
        position = 0
        while position < len(self.running):
            run = self.running[position]
            try:
                self._reserve(run)
            except NoRoom:
                if not self._segments.evict():
                    self._put_back_last()
            else:
                position += 1

    def _put_back_last(self) -> None:
        """The run that started last waits again. One that is alone starts again, without the prompts that it shares a
        beginning with: they may be long, and the store is certain to have room for a single response only.

        Raises:
            NoRoom: it shares nothing.
        """
        last = self.running[-1]
        if len(self.running) > 1:
            self.end(last)
            self._waiting.appendleft(last.sequence)
            return
        if last.segment.parent is None:
            raise NoRoom
        self.restart()
        self._start_waiting()

    def _reserve(self, run: Run) -> None:
        num_tokens = run.num_fed + run.num_unfed
        if not num_tokens or not run.segment.is_done:
            return
        if run.place is None:
            run.place = self._store.new(num_tokens, is_shared=False)
            self._store.use(run.place)
        else:
            self._store.reserve(run.place, num_tokens)
