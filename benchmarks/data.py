"""What prompts cost: seconds and memory of loading rows of text, at a first start and at one that resumes.

`python -m benchmarks.data [--rows 2000000] [--json]` writes short rows as JSON lines and as Parquet, and loads each in
a process of its own, twice: the second time the tokenized prompts are on disk. CPU seconds are of that process, as wall
seconds depend on what else runs; memory is the largest resident set, imports included.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from async_rl.config.prompts_section import PromptsSection
from async_rl.data.prompts import PromptSource

NUM_WORDS = 5000
WORDS_PER_PROMPT = 14
ROWS_AT_ONCE = 50_000


def write_rows(directory: Path, num_rows: int) -> None:
    """The same rows as `rows.jsonl` and `rows.parquet`."""
    rng = random.Random(0)
    words = [f"w{i}" for i in range(NUM_WORDS)]
    parquet: Any = None
    with (directory / "rows.jsonl").open("w") as lines:
        for start in range(0, num_rows, ROWS_AT_ONCE):
            rows = [
                {
                    "prompt": " ".join(rng.choices(words, k=WORDS_PER_PROMPT)),
                    "answer": str(rng.randrange(10**6)),
                    "id": i,
                }
                for i in range(start, min(num_rows, start + ROWS_AT_ONCE))
            ]
            lines.writelines(json.dumps(row) + "\n" for row in rows)
            table = pyarrow.Table.from_pylist(rows)
            parquet = parquet or pyarrow.parquet.ParquetWriter(directory / "rows.parquet", table.schema)
            parquet.write_table(table)
    parquet.close()


def load(source: Path, cache: Path, deduplicate: bool) -> dict[str, Any]:
    """Loads the prompts in this process."""
    backend = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(NUM_WORDS)} | {"[UNK]": NUM_WORDS}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    tokenizer.chat_template = "{% for m in messages %}{{m.role}}: {{m.content}}\n{% endfor %}"
    held_out = 0.01 if deduplicate else 0.0
    config = PromptsSection(source=str(source), prompts_per_batch=512, deduplicate=deduplicate, held_out=held_out)
    before_mb, cpu_s, wall_s = _peak_mb(), time.process_time(), time.monotonic()
    prompts = PromptSource.load(config, tokenizer, 0, cache)
    loaded = time.process_time() - cpu_s, time.monotonic() - wall_s
    prompts.batch(0)
    cpu_s = time.process_time()
    for iteration in range(1, 11):
        prompts.batch(iteration)
    return {
        "source": source.name,
        "deduplicate_and_held_out": deduplicate,
        "prompts": len(prompts),
        "load_cpu_s": round(loaded[0], 1),
        "load_wall_s": round(loaded[1], 1),
        "batch_of_512_cpu_ms": round((time.process_time() - cpu_s) * 100, 1),
        "peak_mb": round(_peak_mb()),
        "peak_before_mb": round(before_mb),
        "disk_mb": round(sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) / 1e6),
    }


def _peak_mb() -> float:
    # Not `ru_maxrss`, which begins with that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data")
    parser.add_argument("--rows", type=int, default=2_000_000, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    parser.add_argument("--load", nargs=3, metavar=("SOURCE", "CACHE", "0|1"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.load:
        source, cache, deduplicate = options.load
        print(json.dumps(load(Path(source), Path(cache), deduplicate == "1")))
        return
    found = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_rows(directory, options.rows)
        for kind in ("jsonl", "parquet"):
            for start, deduplicate in (("first", "0"), ("resumed", "0"), ("resumed", "1")):
                words = ["--load", str(directory / f"rows.{kind}"), str(directory / kind), deduplicate]
                told = subprocess.run(
                    [sys.executable, "-m", "benchmarks.data", *words], stdout=subprocess.PIPE, check=True
                )
                found.append({"start": start, **json.loads(told.stdout)})
                if not options.json:
                    print(found[-1], flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
