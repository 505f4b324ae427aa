"""Creates the quickstart's base model: `python -m deploy.quickstart.warm_start --seed N --run-dir DIR`.

A small random Qwen3 is trained on answers, with words of a separate set, until it solves about a third of the words:
with less, too few responses earn a reward to learn from; with more, GRPO has little left to improve. Writes into the
run's folder `base_model/` (checkpoint and tokenizer), `data/*.jsonl` and `warm_start.jsonl` (a record per check).

Shape legend: B words, T tokens of the longest sequence.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deploy.quickstart.task import Row, make_splits, make_tokenizer, write_rows

BATCH_SIZE = 64
LEARNING_RATE = 2e-3
RAMP_STEPS = 20
CHECK_EVERY = 2
"""Steps between two accuracy checks; towards the end the accuracy can rise by 0.05 within a few steps."""
HOPELESS_LOSS = 0.7
"""Nats per token above which hardly any word can be right, so that the accuracy is not computed."""
TARGET_ACCURACY = 0.30
MAX_STEPS = 600


@dataclass(frozen=True, slots=True)
class Check:
    """Progress of the warm start: `loss` in nats per answer token, `accuracy` expected over the validation words."""

    step: int
    loss: float
    accuracy: float


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A random Qwen3 of 0.4 million parameters with its end-of-response token configured."""
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        # Sequences are at most 24 tokens long: with the usual base most dimensions of a head would hardly distinguish
        # positions.
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},
        **special,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    train: Sequence[Row],
    validation: Sequence[Row],
    *,
    seed: int,
    target_accuracy: float = TARGET_ACCURACY,
    max_steps: int = MAX_STEPS,
) -> Iterator[Check]:
    """Trains on answers until `target_accuracy` of the validation words is reached, or for `max_steps`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    words = random.Random(seed)
    for step in range(1, max_steps + 1):
        logprobs_BT, mask_BT = answer_logprobs(model, tokenizer, words.sample(train, BATCH_SIZE))
        loss = -logprobs_BT.sum() / mask_BT.sum()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / RAMP_STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            hopeless = loss.item() > HOPELESS_LOSS
            accuracy = 0.0 if hopeless else expected_accuracy(model, tokenizer, validation)
            yield Check(step, loss.item(), accuracy)
            if accuracy >= target_accuracy:
                return


@torch.no_grad()
def expected_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> float:
    """The share of words that sampling at temperature 1 solves, in expectation: the mean probability of the answers.

    It needs one forward pass and has no sampling noise, so all seeds stop at the same level.
    """
    logprobs_BT, _ = answer_logprobs(model, tokenizer, rows)
    return logprobs_BT.sum(1).exp().mean().item()


def answer_logprobs(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the answers and their end tokens, float32 [B, T - 1], 0 elsewhere; and their mask, bool."""
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    answers = tokenizer([row["answer"] + tokenizer.eos_token for row in rows])["input_ids"]
    ids_BT = torch.zeros(len(rows), max(map(len, prompts)) + max(map(len, answers)), dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids_BT[i, :end] = torch.tensor(prompt + answer)
        mask_BT[i, len(prompt) : end] = True
    # Padding is on the right, where causal attention keeps it from affecting any value that is read.
    logprobs_BTV = model(input_ids=ids_BT[:, :-1]).logits.float().log_softmax(-1)
    targets_BT, mask_BT = ids_BT[:, 1:], mask_BT[:, 1:]
    return logprobs_BTV.gather(2, targets_BT[..., None])[..., 0] * mask_BT, mask_BT


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="deploy.quickstart.warm_start")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS)
    arguments = parser.parse_args(argv)
    run_dir: Path = arguments.run_dir
    splits = make_splits(arguments.seed)
    write_rows(run_dir / "data" / "held_out.jsonl", splits.held_out)
    write_rows(run_dir / "data" / "prompts.jsonl", splits.prompts)
    tokenizer = make_tokenizer()
    torch.manual_seed(arguments.seed)
    model = make_model(tokenizer)
    with (run_dir / "warm_start.jsonl").open("w", buffering=1) as log:
        for check in warm_start(
            model,
            tokenizer,
            splits.warm_start,
            splits.validation,
            seed=arguments.seed,
            max_steps=arguments.max_steps,
        ):
            log.write(json.dumps(asdict(check)) + "\n")
    model.save_pretrained(run_dir / "base_model")
    tokenizer.save_pretrained(run_dir / "base_model")


if __name__ == "__main__":
    main(sys.argv[1:])
