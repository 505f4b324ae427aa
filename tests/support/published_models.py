"""Model directories with the sizes that public models publish in their config.json, but no weights; small data files in
the published formats. For tests of what is checked before a start."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_HEADER = b'{"lm_head.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
WEIGHTS = len(_HEADER).to_bytes(8, "little") + _HEADER
"""A safetensors file with as little as is looked at."""

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_QWEN2: dict[str, Any] = {"model_type": "qwen2", "tie_word_embeddings": False}


def _sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": {**_QWEN3, **_sizes(28, 1024, 3072, 16, 8), "tie_word_embeddings": True},
    "Qwen/Qwen3-1.7B": {**_QWEN3, **_sizes(28, 2048, 6144, 16, 8), "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": {**_QWEN3, **_sizes(36, 4096, 12288, 32, 8)},
    "Qwen/Qwen3-30B-A3B": {
        **_QWEN3,
        **_sizes(48, 2048, 6144, 32, 4),
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **_QWEN2,
        **_sizes(24, 896, 4864, 14, 2),
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **_QWEN2,
        **_sizes(28, 1536, 8960, 12, 2),
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B": {
        **_QWEN2,
        **_sizes(28, 3584, 18944, 28, 4),
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
    },
    # Made of the hub's HuggingFaceTB/SmolLM2-135M-Instruct, by the recipe's first command.
    "runs/smollm2/base_model": {
        **_sizes(30, 576, 1536, 9, 3),
        "model_type": "llama",
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": {
        **_QWEN2,
        **_sizes(64, 5120, 27648, 40, 8),
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
    },
}
"""Name on the hub -> the sizes of its config.json."""

NUM_ROWS = 200


def write_models(root: Path) -> None:
    """The directory of each model below `root`, called as on the hub, so that a config there finds it by that name."""
    for name, config in CONFIGS.items():
        directory = root / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "tokenizer.json").write_text("{}")
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
        (directory / "model.safetensors").write_bytes(WEIGHTS)


def write_data(root: Path) -> None:
    """`NUM_ROWS` rows of GSM8K and DAPO-Math-17k and 30 of AIME 2024, where their repositories on the hub have them;
    and sums where the quickstart of SmolLM2 writes them."""
    gsm8k = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(NUM_ROWS)]
    dapo = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"Solve problem {i}.", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{i}"},
        }
        for i in range(NUM_ROWS)
    ]
    aime = [
        {"id": 60 + i, "problem": f"Find {i}.", "solution": "...", "answer": f"{i:03}", "url": "", "year": "2024"}
        for i in range(30)
    ]
    sums = [{"prompt": f"State the final answer: {i} + {i} =", "answer": str(2 * i)} for i in range(NUM_ROWS)]
    (root / "runs/smollm2/data").mkdir(parents=True)
    with (root / "runs/smollm2/data/prompts.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in sums)
    for path, rows in {
        "gsm8k/main/train-00000-of-00001.parquet": gsm8k,
        "gsm8k/main/test-00000-of-00001.parquet": gsm8k,
        "dapo/data/dapo-math-17k.parquet": dapo,
        "aime24/data/train-00000-of-00001.parquet": aime,
    }.items():
        table = root / "data" / path
        table.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), table)
