"""Measures a checkpoint on held-out words: `python -m deploy.quickstart.evaluate --model DIR --rows FILE --out FILE`.

Every word is answered once, sampled at temperature 1 as in the run, and counts only if the answer is exactly right and
ended. Writes JSON: accuracy, num_words, and the first samples (prompt word, answer, response, whether it is correct).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from deploy.quickstart.task import MAX_NEW_TOKENS, Row, read_rows

NUM_SAMPLES = 12
SEED = 0


@torch.no_grad()
def sample_responses(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]
) -> list[str | None]:
    """One response per prompt at temperature 1; None where it did not end within `MAX_NEW_TOKENS`."""
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    # Its self is typed for another type checker.
    output_BT = model.generate(  # type: ignore[misc]
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    assert isinstance(output_BT, torch.Tensor)
    responses = output_BT[:, batch["input_ids"].shape[1] :].tolist()
    return [
        _text(tokenizer, response[: response.index(tokenizer.eos_token_id)])
        if tokenizer.eos_token_id in response
        else None
        for response in responses
    ]


def _text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    (text,) = tokenizer.batch_decode([token_ids])
    return text


def evaluate(model_path: Path, rows: Sequence[Row]) -> dict[str, object]:
    """The record described above."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    torch.manual_seed(SEED)
    responses = sample_responses(model, tokenizer, [row["prompt"] for row in rows])
    correct = [response == row["answer"] for row, response in zip(rows, responses, strict=True)]
    samples = [
        {"word": row["word"], "answer": row["answer"], "response": response, "correct": right}
        for row, response, right in zip(rows[:NUM_SAMPLES], responses, correct, strict=False)
    ]
    return {"accuracy": sum(correct) / len(rows), "num_words": len(rows), "samples": samples}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="deploy.quickstart.evaluate")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint with its tokenizer")
    parser.add_argument("--rows", type=Path, required=True, help="JSONL of held-out words")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args(argv)
    arguments.out.write_text(json.dumps(evaluate(arguments.model, read_rows(arguments.rows)), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
