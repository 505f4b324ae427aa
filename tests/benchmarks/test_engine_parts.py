"""The parts of the embedded engine's time add up to the whole."""

import pytest

from benchmarks.common.case import Case
from benchmarks.engine_parts import PARTS, part_of, run


@pytest.mark.nightly
def test_the_parts_add_up_to_the_whole() -> None:
    case = Case.parse("tiny:40:2:2")
    found = run([case])
    total = found.pop(f"{case}.total")
    assert found.keys() == {f"{case}.{part}" for part in (*PARTS, "elementwise", "python")}
    assert sum(found.values()) == pytest.approx(total, abs=1e-3)
    assert all(found[f"{case}.{part}"] > 0 for part in ("products", "attention", "sampling", "elementwise"))


def test_operators_are_sorted_by_their_names() -> None:
    names = ("aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_log_softmax", "aten::mul")
    assert [part_of(name) for name in names] == ["products", "attention", "sampling", "elementwise"]
    assert part_of("aten::_softmax") == "attention" and part_of("aten::index_select") == "copies"
