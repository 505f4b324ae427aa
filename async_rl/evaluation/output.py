"""The files that `python -m async_rl.evaluation` writes, during the evaluation and at its end."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from async_rl.evaluation.recorder import SetResult
from async_rl.evaluation.sets import LoadedSet
from async_rl.files import named_write_errors, write_file
from async_rl.tracking.records import require_no_run
from async_rl.types import Prompt, Response, Scores

PROGRESS, RESULTS, RESPONSES = "progress.jsonl", "results.jsonl", "responses.jsonl"

NUM_SHOWN = 12
"""The first prompts of each set, whose responses are written: enough to see what the figures mean."""


class Output:
    """Files of one evaluation: `PROGRESS` grows with every finished prompt, the others are written at the end.

    Raises:
        ConfigError: the directory is that of a run.
        WriteFailed: it, or a file in it, cannot be written; also of `on_scored` and `finish`.
    """

    def __init__(self, directory: Path, sets: Sequence[LoadedSet]) -> None:
        require_no_run(directory)
        with named_write_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._total = sum(len(loaded.prompts) for loaded in sets)
        first = [(loaded.name, prompt.prompt_id) for loaded in sets for prompt in loaded.prompts[:NUM_SHOWN]]
        self._shown: dict[tuple[str, str], Mapping[str, Any] | None] = dict.fromkeys(first)
        with named_write_errors(directory / PROGRESS):
            self._progress = (directory / PROGRESS).open("w", buffering=1)

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()

    def on_scored(self, loaded: LoadedSet, prompt: Prompt, responses: Sequence[Response], scores: Scores) -> None:
        """Notes a finished prompt."""
        with named_write_errors(self._directory / PROGRESS):
            self._progress.write(json.dumps({"set": loaded.name, "total_prompts": self._total}) + "\n")
        key = (loaded.name, prompt.prompt_id)
        if key in self._shown:
            labels, values = [label for label, _ in scores.shown], [rewards for _, rewards in scores.shown]
            self._shown[key] = {
                "set": loaded.name,
                "prompt_id": prompt.prompt_id,
                "row": prompt.row,
                "responses": [
                    {
                        "text": response.text,
                        "finish_reason": response.finish_reason,
                        "reward": reward,
                        **({"reward_parts": dict(zip(labels, of_parts, strict=True))} if labels else {}),
                    }
                    for response, reward, *of_parts in zip(responses, scores.rewards, *values, strict=True)
                ],
            }

    def finish(self, results: Iterable[SetResult]) -> None:
        """Writes the results, a line per set, and the responses, a line per prompt in the order of the sets."""
        lines = ({key: value for key, value in result.record().items() if key != "iteration"} for result in results)
        # A row of a Parquet file may contain values that JSON does not have.
        self._write(RESPONSES, filter(None, self._shown.values()))
        self._write(RESULTS, lines)

    def _write(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        write_file(self._directory / name, "".join(json.dumps(line, default=str) + "\n" for line in lines))
