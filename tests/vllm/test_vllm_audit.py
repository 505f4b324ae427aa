"""Audits of real vLLM: each fault is named that it can have, and sound servers have none.

Four servers get the weights of one fault after the other: in float32, in bfloat16, one of another family, and one that
reports log-probs of raw logits.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from async_rl.records.findings import Finding, all_hold
from tests.support.audit_faults import Fault, adapted, scale_head
from tests.support.audited_vllm import KEPT, VLLM_FAULTS, VllmServers, VllmSetting
from tests.support.tiers import at_night
from tests.vllm.conftest import running_vllm
from trainer.audit.audit import audit
from trainer.audit.given import Options

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKEN = "s3cret"

BY_DAY = ("two classes old", KEPT)
"""Both of one server: weights with --before, and an update while the audit runs."""


@pytest.fixture(scope="module")
def servers(vllm_python: str, vllm_tmpdir: Path) -> Iterator[VllmServers]:
    with ExitStack() as stack:
        yield VllmServers(lambda model, *options: running_vllm(vllm_python, model, vllm_tmpdir, *options), stack)


def audited(setting: VllmSetting) -> list[Finding]:
    with setting.engine() as url:
        return audit(Options(**setting.options(url), token=TOKEN))[1]


@pytest.mark.parametrize("name", [name if name in BY_DAY else at_night(name) for name in VLLM_FAULTS])
def test_a_fault_of_vllm_is_named(name: str, servers: VllmServers, tmp_path: Path) -> None:
    fault = VLLM_FAULTS[name]
    findings = audited(VllmSetting(tmp_path, fault, servers).make())
    causes = [finding.cause or "" for finding in findings if finding.outcome == "fails"]
    assert causes and causes[0].startswith(fault.cause), findings


SOUND = {
    "in float32": Fault(""),
    "in bfloat16": Fault("", dtype="bfloat16"),
    "of another family": Fault("", "llama"),
    "adapters": Fault("", change=adapted(), needs=("adapter",)),
    "an update": Fault("", needs=("before", "update")),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_vllm_has_no_fault(name: str, servers: VllmServers, tmp_path: Path) -> None:
    findings = audited(VllmSetting(tmp_path, SOUND[name], servers).make())
    assert all_hold(findings), findings
    of_text = {finding.check: finding.outcome for finding in findings}
    assert of_text["tokens of a text"] == of_text["tokens of a chat"] == "holds"


@pytest.mark.nightly
@pytest.mark.parametrize("sureness", [0.0, 200.0, 2000.0])
def test_a_sound_vllm_has_no_fault_however_sure_its_model_is(
    sureness: float, servers: VllmServers, tmp_path: Path
) -> None:
    setting = VllmSetting(tmp_path, Fault("", dtype="bfloat16"), servers).make()
    scale_head(setting.sound, sureness)
    assert all_hold(findings := audited(setting)), findings
