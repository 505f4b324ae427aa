from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from trainer.hf.checkpoint import find_checkpoint


def test_a_checkpoint_is_a_directory_with_a_config_or_the_name_of_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json: give a Hugging Face checkpoint directory"):
        find_checkpoint(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert find_checkpoint(str(tmp_path)) == tmp_path
    for neither in (str(tmp_path / "missing"), "no/such/model", "owner/not-in-the-cache"):
        with pytest.raises(ConfigError, match="is neither a directory nor a model that can be fetched from the hub"):
            find_checkpoint(neither)
