from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from deploy.quickstart.vllm_python import find_vllm_python


def test_the_python_beside_the_project_is_taken_where_this_one_has_no_vllm(tmp_path: Path) -> None:
    python = tmp_path / "python"
    with pytest.raises(ConfigError, match="make vllm"):
        find_vllm_python(python)
    python.touch()
    assert find_vllm_python(python) == str(python)
