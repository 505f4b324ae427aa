"""`async-rl init MODEL DATA [-o run.toml]`: writes the commented config of a first run; starts nothing.

Exit codes: 0 the config was written, 1 it was, and something has to be corrected before it runs, which is named, 2 it
was not, since something is missing that it cannot see.
"""

import os
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from async_rl.checks.preflight import find_faults
from async_rl.checks.preflight.model import ModelFiles
from async_rl.checks.preflight.source_guess import SourceGuess, guess_source
from async_rl.config.file import parse_config
from async_rl.config.keys import keys_of
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.shared.files import write_file
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals
from deploy.init.choose import Choice, Seen, choose
from deploy.init.vllm_choice import BESIDE, VllmChoice, find_vllm
from deploy.init.write import config_text
from deploy.local.machine import find_devices, own_cores
from deploy.local.machine_memory import device_memory, host_memory

CHARACTERS_PER_TOKEN = 2
"""Without a tokenizer.json: few texts have more tokens than that, but those of digits and of rare scripts."""

KINDS: tuple[Literal["cuda", "npu"], ...] = ("cuda", "npu")


def look_around(model: str, source: str, reward: str | None, prompt_column: str | None) -> Seen:
    """Everything that decides the config.

    Raises:
        ConfigError: model or data cannot be read, or nothing tells the reward.
    """
    files = ModelFiles.find(model)
    look = guess_source(source, prompt_column)
    if (reward or look.reward) is None:
        raise ConfigError(
            f"{source!r} has no column of answers ({', '.join(look.names)}), so nothing tells how responses are "
            f"scored: give --reward, {keys_of(Config)['reward.name'].description}"
        )
    device, names = _devices()
    return Seen(
        model_path=model,
        shape=files.shape,
        max_positions=files.max_positions,
        has_chat_template=files.has_chat_template,
        source=source,
        look=look,
        prompt_tokens=_num_tokens(look, files),
        reward=reward or look.reward or "",
        device=device,
        num_devices=len(names),
        device_bytes=device_memory(device, names),
        num_cores=len(own_cores()) or os.cpu_count() or 1,
        host_bytes=host_memory().available_bytes,
        vllm=find_vllm(model, device, _other_pythons()) if names else VllmChoice(False),
    )


def _other_pythons() -> Iterator[Path]:
    """Interpreters that may have the vLLM which cannot be in the trainer's own."""
    yield BESIDE
    active = os.environ.get("VIRTUAL_ENV")
    if active and Path(active).resolve() != Path(sys.prefix).resolve():
        yield Path(active, "bin", "python")


def _devices() -> tuple[Literal["cpu", "cuda", "npu"], tuple[str, ...]]:
    for kind in KINDS:
        if found := find_devices(kind, os.environ, asks_torch=False):
            return kind, found
    return "cpu", ()


def _num_tokens(look: SourceGuess, files: ModelFiles) -> int:
    """Tokens of the longest prompt, by the checkpoint's tokenizer.json where it can be read without transformers."""
    path = files.directory / "tokenizer.json" if files.directory is not None else None
    if path is None or not path.is_file() or find_spec("tokenizers") is None:
        return max(1, len(look.longest_prompt) // CHARACTERS_PER_TOKEN)
    # An optional dependency, of the extras.
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_file(str(path))
    # It raises plain `Exception`.
    except Exception as error:
        raise ConfigError(f"{str(path)!r} is no tokenizer: {error}; download or save it again") from error
    return max(1, len(tokenizer.encode(look.longest_prompt).ids))


def make_parser() -> Parser:
    parser = Parser(
        "async-rl init",
        "Writes the commented config of a first run, from what model, data and machine show.",
        "MODEL DATA [-o run.toml] [--reward NAME] [--prompt-column NAME] [--run-dir DIR] [--force]",
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face checkpoint: a directory or a hub name")
    parser.add_argument(
        "data", metavar="DATA", help="as prompts.source: a .jsonl, .json, .csv or .parquet file, hf:OWNER/NAME, ..."
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("run.toml"), metavar="FILE", help="default run.toml")
    parser.add_argument("--reward", metavar="NAME", help="reward.name; by default the one that fits the answers")
    parser.add_argument("--prompt-column", metavar="NAME", help="where no column has one of the usual names")
    parser.add_argument("--run-dir", metavar="DIR", help="run.dir; by default runs/ and the name of the file")
    parser.add_argument("--force", action="store_true", help="replace a file of that name")
    return parser


def require_new(output: Path, *, force: bool) -> None:
    """Refuses to replace a file without `force`.

    Raises:
        ConfigError: there is such a file, or its name cannot be used.
    """
    try:
        is_there = output.exists()
    except OSError as error:
        raise ConfigError(f"{str(output)!r} cannot be written: {error.strerror}; name another file with -o") from error
    if is_there and not force:
        raise ConfigError(f"{str(output)!r} is there already: name another file with -o, or replace it with --force")


def write_config(choices: Sequence[Choice], output: Path) -> dict[str, Any]:
    """Writes the config, and returns what it says.

    Raises:
        ConfigError: a name cannot be written to a config.
        WriteFailed: it cannot be written.
    """
    text = config_text(choices, output.name)
    # What is written is read as a run would read it: a path may have what TOML cannot say.
    try:
        said = tomllib.loads(text)
        write_file(output, text.encode())
    except (tomllib.TOMLDecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"a name cannot be written to a config: {error}; rename the file or directory") from error
    return said


def find_mistakes(said: dict[str, Any], source: str) -> list[str]:
    """What has to be corrected before the config of these tables runs."""
    try:
        config = parse_config(said, source=source)
    except ConfigError as error:
        return [str(error)]
    return [str(fault.error) for fault in find_faults(config, trains=True, serves=True, is_whole=False)]


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    output: Path = arguments.output
    stop_on_signals()
    try:
        seen = look_around(arguments.model, arguments.data, arguments.reward, arguments.prompt_column)
        require_new(output, force=arguments.force)
        choices = choose(seen, arguments.run_dir or f"runs/{output.stem}")
        said = write_config(choices, output)
    except Stopped as end:
        return explain_end(end)
    except AsyncRLError as error:
        explain_end(error)
        return USAGE_ERROR
    print(f"{output}: {seen.look.seen}; reward {seen.reward}; {seen.device}, {seen.num_cores} cores")
    for reason in (choice.reason for choice in choices if choice.name == "adapter.rank"):
        print(f"adapters in place of all weights, docs/adapters.md: {reason}")
    if mistakes := find_mistakes(said, str(output)):
        print("correct before it runs:", *mistakes, sep="\n", file=sys.stderr)
        return 1
    name = shlex.quote(str(output))
    print(f"next: async-rl check {name}, then async-rl run {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
