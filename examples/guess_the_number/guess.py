"""Guess the number: a rollout of several turns, whose environment answers each guess with `higher` or `lower`.

One turn is one token. Tokens are built here, from the model's own vocabulary, so no chat template is needed.
"""

NUMBERS = range(1, 8)
"""Three guesses are enough for seven numbers, if each one halves those that are left."""

WORDS = ("<pad>", "<eos>", "<unk>", "number?", "higher", "lower", *map(str, NUMBERS))
"""The vocabulary; a word's place is its token id."""

MAX_GUESSES = 3


async def rollout(prompt, policy):
    """1.0 if the secret number is found within three guesses, else 0.0."""
    secret = prompt.row["secret"]
    context = list(prompt.token_ids)
    for _ in range(MAX_GUESSES):
        turn = await policy.generate(token_ids=context, max_tokens=1)
        guess = WORDS[turn.token_ids[0]]
        if guess == str(secret):
            return 1.0
        # Whatever is no number is too low.
        answer = "lower" if guess.isdigit() and int(guess) > secret else "higher"
        context += [*turn.token_ids, WORDS.index(answer)]
    return 0.0
