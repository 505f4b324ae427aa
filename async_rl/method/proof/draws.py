"""Whether sampled tokens were drawn from the distribution whose log-probs came with them, over batches.

An engine may report the log-probs of the whole distribution and draw from another one: at another temperature, or from
the likeliest tokens only. Log-probs then equal the trainer's, and every comparison of them holds. What differs is how
often likely tokens come. For a power c, q(x) = p(x)^c / sum p^c is the distribution at 1/c times the temperature. The
likelihood ratio of drawn tokens, the product of q(x) / r(x), has the mean 1 if they were drawn from r as reported,
whatever each response had before, and whenever it ended: it is a martingale (Ville 1939; e-processes, Ramdas et al.
2023). So it exceeds 1/a with a probability of at most a, for any number of tokens, and whatever noise lies between r
and the trainer's p. The trainer computes q / p (`trainer/model/logprobs.py`), to which p / r, the gap, is added; here
it is multiplied over the tokens of an instance, from the batch on that makes it largest (Page's CUSUM).
"""

import math
from collections.abc import Mapping

from async_rl.method.proof.logprob_gaps import LogprobGaps

POWERS = (0.875, 1.125)
"""Hotter and colder. Power for any change of temperature that is more than half as far as these."""

LIMIT = math.log(1e12)
"""Of the log-ratio. A sound instance reaches it from a given batch on with a probability of at most 10^-12."""

ALL = "the batch"

_NAMES = ("a higher temperature", "a lower temperature, or from likely tokens only")


class Draws:
    """The log-ratios of each instance and of all, over the batches of a run since it was started."""

    def __init__(self) -> None:
        self._log_ratios: dict[str, tuple[float, ...]] = {}
        self._num_tokens: dict[str, int] = {}

    def add(self, by_instance: Mapping[str, LogprobGaps], num_choices: float = 1) -> None:
        """Adds a batch.

        Args:
            num_choices: in how many ways the batch may have been chosen from what was drawn: what is chosen by what was
                drawn has a ratio of at most so many times that of what is not (the sum over all choices).
        """
        kept = {ALL: LogprobGaps.total(by_instance.values()), **by_instance}
        for name, gaps in kept.items():
            if not gaps.num_drawn:
                continue
            before = self._log_ratios.get(name, (0.0,) * len(POWERS))
            if max(before) <= 0:
                self._num_tokens[name] = 0
            added = (gaps.hotter_sum - math.log(num_choices), gaps.colder_sum - math.log(num_choices))
            self._log_ratios[name] = tuple(max(old, 0.0) + new for old, new in zip(before, added, strict=True))
            self._num_tokens[name] += gaps.num_drawn
        # Instances come and go; one that gives no cause is like one that was never seen.
        for name in [name for name, found in self._log_ratios.items() if name not in kept and max(found) <= 0]:
            del self._log_ratios[name], self._num_tokens[name]

    @property
    def violations(self) -> list[str]:
        """What no sound instance does, within one in 10^12."""
        return [
            f"{name}: its last {self._num_tokens[name]} tokens are e^{log_ratio:.1f} times likelier at {kind} than by "
            "the log-probs that came with them: they were drawn from another distribution than the one reported; look "
            "at the engine's temperature, top_p, top_k, min_p and penalties"
            for name, found in self._log_ratios.items()
            for log_ratio, kind in zip(found, _NAMES, strict=True)
            if log_ratio >= LIMIT
        ]

    def figures(self) -> dict[str, object]:
        """What the ledger has: the largest log-ratios of all and of each instance, and their limit."""
        largest = {name: max(found) for name, found in self._log_ratios.items()}
        return {"log_ratio": largest.pop(ALL, None), "limit": LIMIT, "instances": largest}
