def exact(prompt, responses, row):
    """1 for the answer alone, 0.5 for an answer that contains it."""
    return [1.0 if r.text.strip() == row["answer"] else 0.5 * (row["answer"] in r.text) for r in responses]


exact.correct_at = 1.0  # responses with this reward or more are correct: for accuracy and pass@k
