import re


def close(prompt, responses, row):
    """1 for the solution as the last number of the response, less the farther that number is from it, 0 without one."""
    rewards = []
    for response in responses:
        numbers = re.findall(r"-?\d+", response.text)
        rewards.append(1 / (1 + abs(int(numbers[-1]) - row["solution"])) if numbers else 0.0)
    return rewards


close.correct_at = 1.0
