"""The turns of one rollout as a tree over tokens, and the responses that the trainer gets of it; for `session`.

A turn was sampled after its context. It extends the recorded turn with the longest tokens (context and sampled ones)
that are a prefix of its context; a turn that extends none is a root. So a rollout whose history only ever grows is one
path, however its requests were made, and any other one branches where its history was changed. Tokens are carried as
ids: what was sampled is never encoded again.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from async_rl.method.token_arrays import ExpertIds, Logprobs, TokenIds
from async_rl.method.types import Response, WeightSpan
from async_rl.rollouts.agents.messages import Message, MessageKey, Tool, key_of, key_of_tools, normalized, num_bytes_of
from async_rl.rollouts.agents.rendering import Renderer


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a request, and after its turn the policy's own, with what they are compared by."""

    messages: tuple[Message, ...]
    keys: tuple[MessageKey, ...]
    tools: str

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> "Conversation":
        """That of a request.

        Raises:
            InvalidRequest: the messages or tools are malformed.
        """
        plain = normalized(messages)
        return cls(tuple(plain), tuple(map(key_of, plain)), key_of_tools(tools))

    @property
    def num_bytes(self) -> int:
        """Of what is said in it."""
        return len(self.tools) + sum(num_bytes_of(message) for message in self.messages)

    def then(self, message: Message) -> "Conversation":
        return Conversation((*self.messages, message), (*self.keys, key_of(message)), self.tools)


@dataclass(frozen=True, slots=True)
class TurnContext:
    """What to sample after; `parent` is the turn whose messages it continues, None for token ids or another history.

    `base` is the beginning of the context that its response will follow in the trainer. Where the engine computes in
    exactly the trainer's order, it has to be known before; None leaves it to `TurnTree.responses`.
    """

    context: TokenIds
    conversation: Conversation | None = None
    parent: "TurnNode | None" = None
    base: TokenIds | None = None


@dataclass(slots=True, eq=False)
class TurnNode:
    """One recorded turn, the `number`th one that was asked for.

    `added` is what its context has beyond its parent's tokens; `start` is where that begins.
    """

    number: int
    parent: "TurnNode | None"
    start: int
    added: TokenIds
    response: Response
    conversation: Conversation | None
    base: TokenIds | None = None
    children: "list[TurnNode]" = field(default_factory=list)

    @property
    def end(self) -> int:
        """The number of its tokens, those of its context included."""
        return self.start + len(self.added) + len(self.response.token_ids)

    @property
    def own(self) -> TokenIds:
        """Its tokens beyond its parent's."""
        return self.added + self.response.token_ids

    @property
    def path(self) -> "list[TurnNode]":
        """From the root to itself."""
        node: TurnNode | None = self
        path: list[TurnNode] = []
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


class TurnTree:
    """The recorded turns of one rollout."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._turns: list[TurnNode] = []
        self._roots: list[TurnNode] = []

    @property
    def turns(self) -> Sequence[TurnNode]:
        """In the order in which they were asked for, which does not depend on which of them was answered first."""
        return self._turns

    @property
    def num_tokens(self) -> int:
        """Of all turns and what they were sampled after, shared ones once."""
        return sum(len(node.own) for node in self._turns)

    def request(self, conversation: Conversation, tools: Sequence[Tool] | None = None) -> TurnContext:
        """The tokens of a conversation: recorded ones as far as it was recorded, and only new messages rendered.

        Where the history is none that was recorded, or the new messages change how it is rendered (a template that
        drops old thinking), all of it is rendered, and the turn becomes a branch. Turns may be recorded in another
        thread meanwhile; these are not continued.

        Raises:
            InvalidRequest: the messages or tools cannot be rendered.
        """
        parent = self._continued_by(conversation)
        if parent is not None and parent.conversation is not None:
            length = len(parent.conversation.keys)
            context, after = self._context_of(parent), conversation.messages[length:]
            earlier, sampled = parent.conversation.messages, parent.response.token_ids
            nothing = TokenIds(), earlier[-1]
            bridged, said = self._renderer.bridge(context, sampled, earlier, after, tools) or nothing
            if bridged[: len(context + sampled)] == context + sampled:
                messages = (*earlier[:-1], said, *after)
                return TurnContext(bridged, Conversation(messages, conversation.keys, conversation.tools), parent)
        return TurnContext(self._renderer.render(conversation.messages, tools), conversation)

    def add(
        self, request: TurnContext, response: Response, message: Message | None = None, number: int | None = None
    ) -> TurnNode:
        """Records a delivered turn; `message` is what the policy said, as the client saw it.

        It is the `number`th turn that was asked for, by default the last one.
        """
        if number is None:
            number = 1 + (self._turns[-1].number if self._turns else 0)
        parent = self.extended_by(request.context, request.base)
        start = 0 if parent is None else parent.end
        said = request.conversation.then(message) if request.conversation is not None and message is not None else None
        node = TurnNode(number, parent, start, request.context[start:], response, said, request.base)
        (self._roots if parent is None else parent.children).append(node)
        bisect.insort(self._turns, node, key=lambda node: node.number)
        return node

    def base_of(self, context: TokenIds, prompt_ids: TokenIds) -> TokenIds:
        """What a turn after this context follows in the trainer: see `responses`."""
        parent = self.extended_by(context)
        if parent is not None and parent.base is not None:
            return parent.base
        return prompt_ids if context[: len(prompt_ids)] == prompt_ids else context

    def extended_by(self, context: TokenIds, base: TokenIds | None = None) -> TurnNode | None:
        """The turn with the most tokens that begin this context; with a base, of those that follow it, too."""
        found: TurnNode | None = None
        candidates = list(self._roots)
        while candidates:
            node = candidates.pop()
            if node.end <= len(context) and context[node.start : node.end] == node.own:
                if (found is None or node.end > found.end) and base in (None, node.base):
                    found = node
                candidates += node.children
        return found

    def remove(self, node: TurnNode) -> None:
        """Forgets a turn that did not arrive; no other may extend it."""
        assert not node.children, "a turn that was continued has arrived"
        (self._roots if node.parent is None else node.parent.children).remove(node)
        self._turns.remove(node)

    def responses(self, prompt_ids: TokenIds) -> tuple[Response, ...]:
        """One response for each turn that none extends, without texts; the order does not depend on that of turns.

        Each sampled token is labelled in the first response that has it, and observed in the others. A response is
        based on `prompt_ids` where its tokens begin with them, else on the context of its first turn.
        """
        labelled: set[TurnNode] = set()
        responses = []
        for leaf in self._leaves(prompt_ids):
            new = [node for node in leaf.path if node not in labelled]
            labelled.update(new)
            responses.append(_response(leaf.path, new, prompt_ids))
        return tuple(responses)

    def _continued_by(self, conversation: Conversation) -> TurnNode | None:
        """The recorded turn with the most messages that begin this conversation; of several, the newest."""
        found, most = None, 0
        for node in tuple(self._turns):
            said = node.conversation
            if said is None or said.tools != conversation.tools or len(said.keys) < most:
                continue
            if said.keys == conversation.keys[: len(said.keys)]:
                found, most = node, len(said.keys)
        return found

    def _context_of(self, node: TurnNode) -> TokenIds:
        return _joined(node.path[:-1]) + node.added

    def _leaves(self, prompt_ids: TokenIds) -> Iterator[TurnNode]:
        """Depth first; siblings in the order of their tokens, after those that begin with the prompt."""
        stack = sorted(self._roots, key=lambda node: (node.added[: len(prompt_ids)] != prompt_ids, node.own))[::-1]
        while stack:
            node = stack.pop()
            if not node.children:
                yield node
            stack += sorted(node.children, key=lambda child: child.own)[::-1]


def _response(path: Sequence[TurnNode], new: Sequence[TurnNode], prompt_ids: TokenIds) -> Response:
    """The response of a path, of which the turns `new` are labelled."""
    root, leaf = path[0], path[-1]
    base = root.base
    if base is None:
        base = prompt_ids if root.added[: len(prompt_ids)] == prompt_ids else root.added
    token_ids = _joined(path)[len(base) :]
    sampled = [(node.end - len(node.response.token_ids) - len(base), node.end - len(base)) for node in new]
    # The trainer knows sampled ranges by the observed ones between them; turns without a token between them are one.
    edges = [0, *(edge for start_end in sampled for edge in start_end)]
    observed = tuple((start, end) for start, end in zip(edges[::2], edges[1::2], strict=False) if start < end)
    prompt_routes, routes = _routes(leaf, len(base))
    return Response(
        token_ids=token_ids,
        logprobs=Logprobs.joined(node.response.logprobs for node in new),
        text="",
        finish_reason=leaf.response.finish_reason,
        weight_spans=_spans([node.response for node in new]),
        instance=leaf.response.instance,
        turn_instances=_instances([node.response for node in new]),
        num_continued=sum(node.response.num_continued for node in new),
        num_resampled=sum(node.response.num_resampled for node in new),
        observed=observed,
        prompt_ids=None if base == prompt_ids else base,
        routes=routes,
        prompt_routes=prompt_routes,
    )


def _routes(leaf: TurnNode, num_base: int) -> tuple[ExpertIds | None, ExpertIds | None]:
    """Those of the base's tokens, and of all after it but the last: as the leaf's instance had them, for all of its
    path."""
    before, own = leaf.response.prompt_routes, leaf.response.routes
    if before is None or own is None:
        return None, None
    whole = ExpertIds.joined([before, own])
    of_base = num_base * (len(whole) // (leaf.end - 1))
    return whole[:of_base], whole[of_base:]


def _joined(path: Sequence[TurnNode]) -> TokenIds:
    return TokenIds.joined(node.own for node in path)


def _instances(responses: Sequence[Response]) -> tuple[tuple[str, int], ...]:
    """Who sampled the tokens of the responses in a row; neighbours of one instance become one."""
    found: list[tuple[str, int]] = []
    for instance, num_tokens in chain.from_iterable(response.sampled_by for response in responses):
        if found and found[-1][0] == instance:
            num_tokens += found.pop()[1]
        found.append((instance, num_tokens))
    return tuple(found)


def _spans(responses: Sequence[Response]) -> tuple[WeightSpan, ...]:
    """Those of the responses in a row; neighbours of one version become one."""
    spans: list[WeightSpan] = []
    num_before = 0
    for response in responses:
        for span in response.weight_spans:
            moved = WeightSpan(span.version, num_before + span.start, num_before + span.end)
            if spans and spans[-1].version == moved.version and spans[-1].end == moved.start:
                moved = WeightSpan(moved.version, spans.pop().start, moved.end)
            spans.append(moved)
        num_before += len(response.token_ids)
    return tuple(spans)
