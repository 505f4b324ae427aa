"""A run from Python, with a reward of its own: `python train.py [MODEL]`."""

import sys

import async_rl

rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]


def score(prompt, responses, row):
    """1 for the answer alone, 0.5 for an answer that contains it."""
    return [1.0 if r.text.strip() == row["answer"] else 0.5 * (row["answer"] in r.text) for r in responses]


score.correct_at = 1.0

run = async_rl.train(
    model=sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B",
    data=rows[:-10],
    reward=score,
    out="runs/sums",
    prompts={"prompts_per_batch": 4, "max_prompt_tokens": 64},
    rollout={"responses_per_prompt": 4, "max_response_tokens": 16},
    train={"iterations": 2},
)
for record in run:
    print(record["iteration"], record["reward_mean"])
run.plot().save("runs/sums.html")
print(run.evaluate(rows[-10:], samples=4)["reward_mean"])
