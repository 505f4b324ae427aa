"""How many instances a run should have: what the trainer desires, once it has desired it for long enough. Pure."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Scaler:
    """The target number of instances, between `least` and `most`.

    It rises to the smallest number desired within the last `up_after_s`, and falls to the largest desired within the
    last `down_after_s`; each only when the desired numbers cover that whole time.
    """

    least: int
    most: int
    up_after_s: float
    down_after_s: float
    target: int = field(init=False)
    _desired: deque[tuple[float, int]] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.target = self.least

    @property
    def follows(self) -> bool:
        """Whether there is a range to follow in."""
        return self.most > self.least

    def update(self, desired: int | None, now_s: float) -> int:
        """Takes the number desired at `now_s`, None if the trainer does not say; returns the target.

        A trainer that does not answer has no desires: what was desired before it fell silent does not count any more.
        """
        if desired is None:
            self._desired.clear()
            return self.target
        self._desired.append((now_s, min(max(desired, self.least), self.most)))
        if lately := self._since(now_s - self.up_after_s):
            self.target = max(self.target, min(lately))
        if lately := self._since(now_s - self.down_after_s):
            self.target = min(self.target, max(lately))
        self._forget(now_s - max(self.up_after_s, self.down_after_s))
        return self.target

    def _since(self, since_s: float) -> list[int]:
        """The numbers desired since then; empty if none was desired before it, so that the time is not covered."""
        if not self._desired or self._desired[0][0] > since_s:
            return []
        *_, start = (i for i, (at_s, _) in enumerate(self._desired) if at_s <= since_s)
        return [number for _, number in list(self._desired)[start:]]

    def _forget(self, before_s: float) -> None:
        """Keeps one number from before `before_s`, which was desired from then on."""
        while len(self._desired) > 1 and self._desired[1][0] <= before_s:
            self._desired.popleft()
