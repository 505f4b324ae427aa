def exact(prompt, responses, row):
    return [1.0 if response.text.strip() == row["answer"] else 0.0 for response in responses]


exact.correct_at = 1.0
