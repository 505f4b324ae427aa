"""Guess the number as an OpenEnv environment: `pip install openenv`, then `uvicorn server:app`."""

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

MAX_GUESSES = 3


class Guess(Action):
    word: str


class Answer(Observation):
    answer: str = ""


class GuessTheNumber(Environment[Guess, Answer, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret = 0
        self._state = State()

    def reset(self, seed=None, episode_id=None, secret=1, **kwargs) -> Answer:
        self._secret = secret
        self._state = State(episode_id=episode_id, step_count=0)
        return Answer(done=False)

    def step(self, action: Guess, timeout_s=None, **kwargs) -> Answer:
        self._state.step_count += 1
        found = action.word == str(self._secret)
        # Whatever is no number is too low.
        is_high = action.word.isdigit() and int(action.word) > self._secret
        done = found or self._state.step_count == MAX_GUESSES
        return Answer(answer="lower" if is_high else "higher", reward=float(found), done=done)

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(GuessTheNumber, Guess, Answer, max_concurrent_envs=256)
