"""Each fault of `tests/support/audit_faults.py` is named, and sound engines have none; engines are in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.records.findings import Finding, all_hold
from tests.support.audit_faults import FAULTS, Fault, Setting, adapted, scale_head
from tests.support.audited_engine import audited_engine
from tests.support.tiers import at_night
from tests.support.tiny_model import make_tiny_model
from trainer.audit.audit import audit
from trainer.audit.given import Options

pytestmark = [pytest.mark.computes, pytest.mark.distributed]

BY_DAY = ("two classes old", "one of two engines old")
"""One of weights with --before, and one that is not of weights alone; the rest needs no other machinery."""

FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "gemma3_text", "olmo2", "granite", "smollm3", "gpt_oss")
AUDITS_PER_ENGINE = 5
"""Each samples anew: of ten families in two dtypes they are a hundred."""


@pytest.mark.parametrize("name", [name if name in BY_DAY else at_night(name) for name in FAULTS])
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    setting = Setting(tmp_path, FAULTS[name]).make()
    with setting.engine() as url:
        _, findings = audit(Options(**setting.options(url)))
    causes = [finding.cause or "" for finding in findings if finding.outcome == "fails"]
    assert causes and causes[0].startswith(FAULTS[name].cause), findings


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_sound_engine_has_a_fault(family: str, dtype: str, tmp_path: Path) -> None:
    checkpoint = make_tiny_model(tmp_path / "model", family, seed=len(family))
    with audited_engine(checkpoint, "--dtype", dtype) as url:
        for _ in range(AUDITS_PER_ENGINE):
            _, findings = audit(Options(url, str(checkpoint), dtype=dtype))
            assert all_hold(findings), findings


@pytest.mark.parametrize("sureness", [0.0, 200.0, 2000.0])
def test_no_sound_engine_has_a_fault_however_sure_its_model_is(sureness: float, tmp_path: Path) -> None:
    """Of nearly all tokens, of which rounding draws many that the checkpoint does not expect."""
    checkpoint = make_tiny_model(tmp_path / "model", "qwen3", seed=3)
    scale_head(checkpoint, sureness)
    with audited_engine(checkpoint, "--dtype", "bfloat16") as url:
        _, findings = audit(Options(url, str(checkpoint), dtype="bfloat16"))
    assert all_hold(findings), findings


@pytest.fixture(params=[("adapter",), ("before", "update")], ids=["adapter", "update"])
def sound(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Finding]]:
    needs: tuple[str, ...] = request.param
    change = adapted() if "adapter" in needs else Fault("").change
    setting = Setting(tmp_path, Fault("", change=change, needs=needs)).make()
    with setting.engine() as url:
        yield audit(Options(**setting.options(url)))[1]


@pytest.mark.nightly
def test_neither_adapters_nor_an_update_are_a_fault(sound: list[Finding]) -> None:
    assert all_hold(sound), sound
