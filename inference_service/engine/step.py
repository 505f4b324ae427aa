"""One step of the model: the work of a schedule as tensors, and the logits that come out."""

from collections import defaultdict
from collections.abc import Sequence as Listing
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from inference_service.engine import attention
from inference_service.engine.attention import OwnPart, SharedPart, Span, StepParts, length_bias
from inference_service.engine.kv_store import Place, Shelf
from inference_service.engine.schedule import Fed, Run, Work
from inference_service.engine.segments import Link, Segment


@dataclass(frozen=True, slots=True)
class Drawing:
    """The runs that get a token now, and their logits, float32 [runs, V]."""

    runs: Listing[Run]
    logits: torch.Tensor


class ModelStep:
    """Runs a model on the work of one step after the other."""

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation(attention.NAME)
        self._model = model
        self._device = model.device
        self._shared: tuple[object, list[SharedPart]] = (None, [])

    def __call__(self, work: Work, generation: int) -> Drawing:
        """Computes the work, and notes what is done; `generation` is the store's."""
        decoding = sorted(work.decoding, key=lambda run: (run.place.shelf.capacity, run.place.slot))
        token_ids = [run.unfed(1)[0] for run in decoding]
        positions = [run.sequence.num_tokens - 1 for run in decoding]
        own = self._own_parts(decoding)
        spans, runs, rows = [], list(decoding), list(range(len(decoding)))
        for fed in work.fed:
            begin = len(token_ids)
            start, links, place, before = _span_of(fed)
            token_ids += fed.token_ids
            positions += range(before, before + len(fed.token_ids))
            spans.append(Span(slice(begin, len(token_ids)), place, start, links))
            runs += fed.draws
            rows += [len(token_ids) - 1] * len(fed.draws)
        parts = StepParts(len(decoding), own, self._shared_parts(decoding, generation), spans)
        kept = sorted(set(rows))
        logits = self._model(
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            attention_mask=None,
            parts=parts,
            use_cache=False,
            logits_to_keep=torch.tensor(kept, dtype=torch.long, device=self._device),
        ).logits[0]
        for run in decoding:
            run.num_fed += 1
        for fed in work.fed:
            if isinstance(fed.what, Segment):
                fed.what.num_done += len(fed.token_ids)
            else:
                fed.what.num_fed += len(fed.token_ids)
        if len(kept) != len(rows):
            index = {row: i for i, row in enumerate(kept)}
            logits = logits[torch.tensor([index[row] for row in rows], device=self._device)]
        return Drawing(runs, logits.float())

    def _own_parts(self, decoding: Listing[Run]) -> list[OwnPart]:
        parts = []
        begin = 0
        while begin < len(decoding):
            shelf = decoding[begin].place.shelf
            end = begin
            while end < len(decoding) and decoding[end].place.shelf is shelf:
                end += 1
            members = decoding[begin:end]
            slots = [run.place.slot for run in members]
            query_of_slot = [begin] * len(shelf.places)
            lengths = [1] * len(shelf.places)
            for query, run in enumerate(members, start=begin):
                query_of_slot[run.place.slot] = query
                lengths[run.place.slot] = run.num_fed + 1
            longest = max(lengths)
            parts.append(
                OwnPart(
                    shelf,
                    slice(begin, end),
                    torch.tensor(slots, device=self._device),
                    torch.tensor(query_of_slot, device=self._device),
                    torch.tensor([run.num_fed for run in members], device=self._device),
                    longest,
                    length_bias(lengths, longest, self._device),
                )
            )
            begin = end
        return parts

    def _shared_parts(self, decoding: Listing[Run], generation: int) -> list[SharedPart]:
        """The same from step to step, as long as the same runs decode and no segment moved."""
        key = (generation, tuple(decoding))
        if self._shared[0] != key:
            self._shared = (key, self._build_shared_parts(decoding))
        return self._shared[1]

    def _build_shared_parts(self, decoding: Listing[Run]) -> list[SharedPart]:
        # Of one shelf, a response is in at most one segment of a part: the levels of a chain are parts of their own.
        members: defaultdict[tuple[int, int], list[tuple[int, Link]]] = defaultdict(list)
        shelves: dict[int, Shelf] = {}
        for query, run in enumerate(decoding):
            for level, link in enumerate(run.links):
                if link.length:
                    shelf = link.place.shelf
                    shelves[shelf.capacity] = shelf
                    members[level, shelf.capacity].append((query, link))
        return [
            self._shared_part(shelves[capacity], found, len(decoding)) for (_, capacity), found in members.items()
        ]

    def _shared_part(self, shelf: Shelf, members: Listing[tuple[int, Link]], num_responses: int) -> SharedPart:
        by_slot: list[list[tuple[int, int]]] = [[] for _ in shelf.places]
        for query, link in members:
            by_slot[link.place.slot].append((query, link.length))
        width = max(len(found) for found in by_slot)
        longest = max(link.length for _, link in members)
        queries, lengths, responses, places = [], [], [], []
        for slot, found in enumerate(by_slot):
            places += range(slot * width, slot * width + len(found))
            responses += [query for query, _ in found]
            padded = [*found, *[found[0] if found else (0, 1)] * (width - len(found))]
            queries += [query for query, _ in padded]
            lengths += [length for _, length in padded]
        is_everyone = len(responses) == num_responses
        if is_everyone:
            # In the order of the responses, so that all are merged at once.
            order = sorted(range(num_responses), key=responses.__getitem__)
            places = [places[i] for i in order]
        bias = length_bias(lengths, longest, self._device)
        if bias is not None:
            bias = bias.view(len(shelf.places), 1, width, longest)
            if all(len({length for _, length in found}) <= 1 for found in by_slot):
                bias = bias[:, :, :1]

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=self._device)

        return SharedPart(
            shelf, tensor(queries), width, longest, bias, tensor(responses), tensor(places), is_everyone
        )


def _span_of(fed: Fed) -> tuple[int, tuple[Link, ...], Place, int]:
    """Where its tokens begin in their place, what is before that, the place, and the first position."""
    if isinstance(fed.what, Segment):
        segment = fed.what
        return segment.num_done, segment.links[1:], segment.place, segment.num_before + segment.num_done
    run = fed.what
    return run.num_fed, run.links, run.place, run.num_shared + run.num_fed
