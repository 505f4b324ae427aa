"""A reward and an algorithm that hold a phase of a run for as long as a test needs."""

HOLDS = '''
def hold(phase):
    """Waits in this phase, once, if the file `hold-PHASE` beside this one says so, until `held-PHASE` is gone."""
    import pathlib
    import time

    asked, held = (pathlib.Path(__file__).with_name(f"{word}-{phase}") for word in ("hold", "held"))
    try:
        asked.rename(held)
    except FileNotFoundError:
        return
    while held.exists():
        time.sleep(0.02)
'''

REWARD = """
def vowels(prompt, responses, row):
    hold("evaluate" if "held_out" in row else "score")
    return [sum(c in "aeiou" for c in r.text) / max(len(r.text), 1) for r in responses]


vowels.correct_at = 0.5
"""

ALGORITHM = """
from async_rl.method.algorithms import PolicyGradient


class Holding(PolicyGradient):
    def _advantages(self, rewards_G):
        hold("train")
        return super()._advantages(rewards_G)
"""
