"""How devices are counted, with the driver's answers given."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from deploy.local.machine import find_devices

FOUR_GPUS = "".join(
    f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})\n  MIG 1g.10gb Device 0: (UUID: MIG-{i})\n" for i in range(4)
)


def cuda(environment: Mapping[str, str], smi: str = FOUR_GPUS, torch: str = "") -> tuple[str, ...]:
    answers = {"nvidia-smi": smi, "env": torch}
    return find_devices("cuda", environment, run=lambda command: answers[command[0]])


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("0", "1", "2", "3")),
        ("2,3", ("2", "3")),
        (" 3 , 0", ("3", "0")),
        ("", ()),
        ("-1", ()),
        ("1,-1,2", ("1",)),
        ("0,9,1", ("0",)),
        ("GPU-2,MIG-0", ("GPU-2", "MIG-0")),
        ("03,GPU-1", ("03", "GPU-1")),
        ("GPU-9,0", ()),
        ("GPU-", ()),
        *((word, ()) for word in ("NoDevFiles", "none", "all", "0-1", "1 0", "1;0", "0x1", "+1", "\u0661")),
    ],
)
def test_an_outer_restriction_is_kept_as_cuda_reads_it(visible: str | None, expected: tuple[str, ...]) -> None:
    assert cuda({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_torch_is_asked_where_the_driver_has_no_tool() -> None:
    assert cuda({}, smi="", torch="2\n") == ("0", "1")
    assert cuda({}, smi="", torch="") == ()
    assert cuda({"CUDA_VISIBLE_DEVICES": "GPU-a"}, smi="", torch="2") == ("GPU-a",)
    assert cuda({"CUDA_VISIBLE_DEVICES": "GPU-a"}, smi="", torch="") == ()


def test_npus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager", "davinci10"):
        (tmp_path / name).touch()
    assert find_devices("npu", {}, dev=tmp_path) == ("0", "1", "2")
    assert find_devices("npu", {"ASCEND_RT_VISIBLE_DEVICES": "1"}, dev=tmp_path) == ("1",)
    assert find_devices("npu", {"ASCEND_RT_VISIBLE_DEVICES": "1,GPU-0"}, dev=tmp_path) == ("1",)


def test_a_cpu_has_none_and_nothing_is_asked() -> None:
    assert find_devices("cpu", {"CUDA_VISIBLE_DEVICES": "0"}, run=lambda command: pytest.fail(str(command))) == ()


@pytest.mark.parametrize("visible", ["1,1", "1,01", "1,GPU-1", "GPU-1,GPU-1", "MIG-0,MIG-0"])
def test_a_device_named_twice_is_refused(visible: str) -> None:
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES is '{visible}', which names a device twice"):
        cuda({"CUDA_VISIBLE_DEVICES": visible})
