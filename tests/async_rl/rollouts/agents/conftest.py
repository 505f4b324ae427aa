from typing import Any

import pytest

from tests.support.chat_tokenizer import make_chat_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat"))
