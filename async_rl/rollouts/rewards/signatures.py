"""The forms of a reward function: async-rl's own, TRL's and verl's, told apart by the names of their parameters.

- own: `f(prompt, responses, row)`, called once for the responses to a prompt, by position;
- TRL's: `f(completions, prompts, COLUMN, ..., **kwargs)`, called once, by name, with lists of one entry per response;
- verl's: `f(data_source, solution_str, ground_truth, extra_info)`, called once for each response, by name.

`preflight` tells them apart in a file's text, `function` adapts what it has loaded.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from async_rl.method.types import Prompt, Response
from async_rl.rollouts.rewards.base import CORRECT_AT, PER_RESPONSE, gathered
from async_rl.shared.programs.user_file import is_async

Form = Literal["own", "TRL's", "verl's"]

COMPLETIONS, SOLUTION = "completions", "solution_str"
"""Parameters that only TRL's form has, and only verl's."""

COMPLETION_IDS, EXTRA = "completion_ids", "extra_info"

OF_VERL = {"data_source": {"data_source", "source"}, "ground_truth": {"reward_model", "ground_truth", "answer"}}
"""The columns that a parameter of verl's form comes from."""

FORMS = (
    "(prompt, responses, row), TRL's (completions, **kwargs), or verl's (data_source, solution_str, ground_truth, "
    "extra_info)"
)

OPEN_ENDED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Call = dict[str, Any]
"""The arguments of a function, by name."""


def form_of(signature: inspect.Signature) -> Form:
    """The form of a function with these parameters.

    Raises:
        ValueError: it cannot be called in any form; says what it takes.
    """
    names = signature.parameters
    if SOLUTION in names:
        return "verl's"
    takes_three = _takes_three(signature)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in names.values())
    if COMPLETIONS in names and (takes_any or not takes_three):
        return "TRL's"
    if not takes_three:
        raise ValueError(f"it takes {signature}, but a reward is called with {FORMS}")
    return "own"


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of any form as one of the own form; asynchronous if it is.

    Raises:
        ValueError: it cannot be called in any form.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some of those written in C have none.
        return function
    form = form_of(signature)
    if form == "own":
        return function

    def calls_of(responses: Sequence[Response], row: Mapping[str, Any]) -> Sequence[Call]:
        if form == "TRL's":
            return _taken(signature, _trl_calls(responses, row), [None] * len(responses))
        return _taken(signature, _verl_calls(responses, row), None)

    result = _of_trl if form == "TRL's" else list

    def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> Any:
        return result([function(**call) for call in calls_of(responses, row)])

    async def score_async(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> Any:
        return result(await gathered([function(**call) for call in calls_of(responses, row)]))

    made = score_async if is_async(function) else score
    for trait in (CORRECT_AT, PER_RESPONSE):
        if hasattr(function, trait):
            setattr(made, trait, getattr(function, trait))
    return made


def _takes_three(signature: inspect.Signature) -> bool:
    try:
        signature.bind(None, None, None)
    except TypeError:
        return False
    return True


def lacking(signature: inspect.Signature, columns: Collection[str]) -> list[str]:
    """The parameters that a function of TRL's or verl's form needs, and that rows with these columns never give."""
    form = form_of(signature)
    if form == "own":
        return []
    given = {COMPLETIONS, COMPLETION_IDS, *("prompts" if name == "prompt" else name for name in columns)}
    if form == "verl's":
        given = {SOLUTION, EXTRA, *(name for name, sources in OF_VERL.items() if not sources.isdisjoint(columns))}
    return [name for name in _needed(signature) if name not in given]


def _needed(signature: inspect.Signature) -> list[str]:
    parameters = signature.parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind not in OPEN_ENDED]


def _taken(signature: inspect.Signature, calls: Sequence[Call], missing: Any) -> Sequence[Call]:
    """Of all that a form has for a function what it takes.

    Args:
        missing: for what it needs and the row lacks, as another row may have it: `lacking`.
    """
    calls = [dict.fromkeys(_needed(signature), missing) | call for call in calls]
    if any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        return calls
    return [{name: value for name, value in call.items() if name in signature.parameters} for call in calls]


def _trl_calls(responses: Sequence[Response], row: Mapping[str, Any]) -> list[Call]:
    """One call for all. Completions are messages where the row's prompt is a conversation, as in TRL; else texts."""
    is_conversation = isinstance(row.get("prompt"), list)
    columns = {"prompts" if name == "prompt" else name: [value] * len(responses) for name, value in row.items()}
    texts = [response.text for response in responses]
    return [
        {
            **columns,
            COMPLETIONS: [[{"role": "assistant", "content": text}] for text in texts] if is_conversation else texts,
            COMPLETION_IDS: [response.token_ids.tolist() for response in responses],
        }
    ]


def _of_trl(returned: Sequence[Any]) -> Any:
    """The list of the only call; a reward that does not apply to a response (None) adds nothing to its sum."""
    (rewards,) = returned
    return [0.0 if each is None else each for each in rewards] if isinstance(rewards, list | tuple) else rewards


def _verl_calls(responses: Sequence[Response], row: Mapping[str, Any]) -> list[Call]:
    """One call for each response, with the columns of verl's data sets; an `answer` is the ground truth elsewhere."""
    model = row.get("reward_model")
    truths = [model.get("ground_truth") if isinstance(model, Mapping) else None, row.get("ground_truth")]
    truth = next((each for each in (*truths, row.get("answer")) if each is not None), None)
    shared = {
        "data_source": row.get("data_source", row.get("source")),
        "ground_truth": truth,
        EXTRA: row.get(EXTRA, {}),
    }
    given = {name: value for name, value in shared.items() if value is not None}
    return [{**given, SOLUTION: response.text} for response in responses]
