"""Expected response lengths: from the prompt's own history, else from all responses so far."""

from collections.abc import Sequence

MEMORY = 0.5
"""Weight of the newest group in a prompt's mean: the policy changes, so older lengths count less."""

MEMORY_OF_ALL = 0.05


class ExpectedLength:
    """Mean response lengths in tokens; `longest` is assumed before the first measurement."""

    def __init__(self, longest: int) -> None:
        self._of_all = float(longest)
        self._any = False
        self._of_prompt: dict[str, float] = {}

    def of(self, prompt_id: str) -> float:
        return self._of_prompt.get(prompt_id, self._of_all)

    def add_lengths(self, prompt_id: str, lengths: Sequence[float]) -> None:
        """Adds the lengths of a finished group's responses, or of its programs' turns."""
        mean = sum(lengths) / len(lengths)
        self._of_all += (MEMORY_OF_ALL if self._any else 1.0) * (mean - self._of_all)
        self._any = True
        known = self._of_prompt.get(prompt_id, mean)
        self._of_prompt[prompt_id] = known + MEMORY * (mean - known)
