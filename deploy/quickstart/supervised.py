"""Supervised training on answers, for the warm starts of the quickstarts: it stops at an accuracy, not at a loss.

Shape legend: B examples, T tokens of the longest one, D hidden size, N answer tokens of all of them, V vocabulary.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, and the tokens of its answer with the one that ends it."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Course:
    """How to teach: AdamW with a learning rate that rises over the first `ramp_steps`."""

    batch_size: int
    learning_rate: float
    ramp_steps: int
    check_every: int
    """Steps between two checks of the accuracy."""
    hopeless_loss: float
    """Nats per token above which hardly any answer can be right, so that the accuracy is not computed."""
    target_accuracy: float
    max_steps: int


@dataclass(frozen=True, slots=True)
class Check:
    """Progress: `loss` in nats per answer token, `accuracy` expected over the validation examples."""

    step: int
    loss: float
    accuracy: float


def teach(
    model: PreTrainedModel, train: Sequence[Example], validation: Sequence[Example], course: Course, *, seed: int
) -> Iterator[Check]:
    """Trains on answers until the target of the course is reached on `validation`, or for its `max_steps`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=course.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    choices = random.Random(seed)
    for step in range(1, course.max_steps + 1):
        logprobs_N, _ = answer_logprobs(model, choices.sample(train, course.batch_size))
        loss = -logprobs_N.mean()
        optimizer.param_groups[0]["lr"] = course.learning_rate * min(1.0, step / course.ramp_steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % course.check_every == 0:
            accuracy = 0.0 if loss.item() > course.hopeless_loss else expected_accuracy(model, validation)
            yield Check(step, loss.item(), accuracy)
            if accuracy >= course.target_accuracy:
                return


@torch.no_grad()
def expected_accuracy(model: PreTrainedModel, examples: Sequence[Example]) -> float:
    """The share of examples that sampling at temperature 1 solves, in expectation: the mean probability of the answers.

    It needs one forward pass and has no sampling noise, so all seeds stop at the same level.
    """
    logprobs_N, owners_N = answer_logprobs(model, examples)
    return torch.zeros(len(examples)).index_add(0, owners_N, logprobs_N).exp().mean().item()


def answer_logprobs(model: PreTrainedModel, examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all answer tokens, float32 [N], and the index of each one's example, int64 [N]."""
    ids_BT = torch.zeros(len(examples), max(len(e.prompt_ids) + len(e.answer_ids) for e in examples), dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for i, example in enumerate(examples):
        end = len(example.prompt_ids) + len(example.answer_ids)
        ids_BT[i, :end] = torch.tensor(example.prompt_ids + example.answer_ids)
        mask_BT[i, len(example.prompt_ids) : end] = True
    # Padding is on the right, where causal attention keeps it from affecting any value that is read. Only answers have
    # logits: those of all tokens would be the largest tensor by far.
    hidden_BTD = model.base_model(input_ids=ids_BT[:, :-1]).last_hidden_state
    logprobs_NV = model.get_output_embeddings()(hidden_BTD[mask_BT[:, 1:]]).float().log_softmax(-1)
    logprobs_N = logprobs_NV.gather(1, ids_BT[:, 1:][mask_BT[:, 1:]][:, None])[:, 0]
    return logprobs_N, mask_BT.nonzero()[:, 0]
