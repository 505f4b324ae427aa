"""What a rank and an instance leave out of their imports, and that what they leave out can still be used."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.distributed


def run(code: str, *arguments: object) -> str:
    """What a new interpreter prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


SCANS = """
import builtins, sys
opened = []
plain = builtins.open
builtins.open = lambda file, *args, **kwargs: opened.append(str(file)) or plain(file, *args, **kwargs)
from async_rl.shared.cpu.model_scan import scan_models_once
if sys.argv[1] == "once":
    scan_models_once()
from transformers import models
print(sum(path.endswith("/qwen3/modeling_qwen3.py") for path in opened))
structure = {key: sorted(names) for key, names in models._import_structure.items()}
print(sorted(structure.items()), sorted(models._class_to_module.items()), sorted(models._object_missing_backend))
"""


@pytest.mark.nightly
def test_transformers_lists_its_models_once_and_as_it_does_by_itself() -> None:
    once, twice = (run(SCANS, each).splitlines() for each in ("once", "twice"))
    assert once[0] == "1"
    assert twice[0] == "2", "transformers reads its models once by itself: scan_models_once can go"
    assert "Qwen3ForCausalLM" in once[1]
    assert once[1] == twice[1]


TOKENIZER = """
import builtins, sys
opened = []
plain = builtins.open
builtins.open = lambda file, *args, **kwargs: opened.append(str(file)) or plain(file, *args, **kwargs)
from async_rl.rollouts.tokenizer import load_tokenizer
load_tokenizer(sys.argv[1], sys.argv[1])
print(sum(path.endswith("/gemma/modeling_gemma.py") for path in opened), "torch" in sys.modules)
"""


@pytest.mark.nightly
def test_a_program_that_loads_a_tokenizer_reads_them_once_and_no_torch(tiny_model: Callable[..., Path]) -> None:
    assert run(TOKENIZER, tiny_model()) == "1 False\n"


COMPILER = """
import torch
from async_rl.shared.cpu.lean_imports import without_compiler
with without_compiler():
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from transformers import masking_utils, modeling_utils
    @torch.compiler.disable(reason="a reason")
    def double(x):
        return 2 * x
import sys
assert "torch._dynamo" not in sys.modules
import torch._dynamo
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex as again
assert again is TransformGetItemToIndex, "a file of the compiler was loaded twice"
print(torch.compile(lambda x: double(x) + 1, backend="eager")(torch.ones(2)).tolist())
marked = torch.compiler.disable(double)
with without_compiler():
    assert torch.compiler.disable(double) is not double, "a compiler that is loaded is used"
"""


@pytest.mark.nightly
def test_the_compiler_works_after_imports_without_it() -> None:
    assert run(COMPILER) == "[3.0, 3.0]\n"


IN_THE_BODY = """
import torch
from async_rl.shared.cpu.lean_imports import without_compiler
with without_compiler():
    from torch._dynamo import is_compiling, config
    assert not is_compiling() and torch._dynamo.config is config
    print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist())
assert torch._dynamo.config is config
"""


@pytest.mark.nightly
def test_what_needs_the_compiler_itself_amid_imports_gets_it() -> None:
    assert run(IN_THE_BODY) == "[2.0, 2.0]\n"


RANK = """
import sys
import trainer.__main__
from trainer.devices import choose_device
choose_device("cpu")
import trainer.parallel, torch
from async_rl.shared.cpu.model_scan import scan_models_once
scan_models_once()
import async_rl.loop, trainer.session
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([weight], lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    (weight**2).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
assert weight.requires_grad and torch.is_grad_enabled()
print(weight.tolist())
print(*sys.modules)
"""

INSTANCE = """
import sys
import inference_service.__main__ as program
import torch
program._import_server(program.parse_options(["--model", sys.argv[1]]))
from inference_service.engine.model import load_model
loaded = load_model(sys.argv[1], torch.device("cpu"), torch.float32)
with torch.inference_mode():
    assert loaded.model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
print(*sys.modules)
"""

UNUSED = {"torch._dynamo", "torch._inductor", "torch.onnx", "datasets", "pandas", "pyarrow", "scipy", "sklearn"}
"""Packages that take a tenth of a second at least."""

OF_RANKS = {"transformers.modeling_utils", "transformers.generation.utils", "accelerate", "openai", "inference_service"}
OF_INSTANCES = {"megatron", "aiohttp", "tensorboard", "trainer"}


@pytest.mark.nightly
def test_a_rank_does_not_load_what_it_does_not_use() -> None:
    weights, modules = run(RANK).splitlines()
    assert sorted({*UNUSED, *OF_RANKS} & {*modules.split()}) == []
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
    assert weights == str(weight.tolist()), "AdamW steps as it does with the compiler loaded"


@pytest.mark.nightly
def test_an_instance_does_not_load_what_it_does_not_use(tiny_model: Callable[..., Path]) -> None:
    *_, modules = run(INSTANCE, tiny_model("qwen3")).splitlines()
    assert sorted({*UNUSED, *OF_INSTANCES} & {*modules.split()}) == []
