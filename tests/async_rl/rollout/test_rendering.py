"""Which renderer a model gets, and what is said where there is none."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import config_from_name
from transformers import AutoTokenizer

from async_rl.errors import ConfigError
from async_rl.programs import extras
from async_rl.rollout.known_rendering import KnownRenderer
from async_rl.rollout.messages import InvalidRequest
from async_rl.rollout.rendering import TemplateRenderer, make_renderer
from tests.support.chat_tokenizer import make_chat_tokenizer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize("name", ["template", "qwen3"])
def test_two_threads_may_use_a_renderer_at_once(tokenizer: Any, name: str) -> None:
    """A thread renders long messages, while the event loop renders short ones."""
    renderer = make_renderer(name, tokenizer, "m")

    def use(text: str) -> Any:
        context = renderer.render([{"role": "user", "content": text}], None)
        return context, renderer.parse(context, context[:20], None), tokenizer.batch_decode([list(context)])

    texts = ["long " * 4000, *("abc"[number % 3] * number for number in range(200))]
    alone = [use(text) for text in texts]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(use, texts * 2)) == alone * 2


@pytest.fixture(scope="module")
def plain_tokenizer(tiny_model: Callable[..., Path]) -> Any:
    """Without special tokens of chats."""
    return AutoTokenizer.from_pretrained(tiny_model())


def test_a_model_gets_the_renderer_of_its_hub_name_or_its_template(tokenizer: Any) -> None:
    assert isinstance(make_renderer("auto", tokenizer, "Qwen/Qwen3-0.6B"), KnownRenderer)
    assert isinstance(make_renderer("auto", tokenizer, "my/finetuned"), TemplateRenderer)
    assert isinstance(make_renderer("qwen3", tokenizer, "my/finetuned"), KnownRenderer)
    assert isinstance(make_renderer("template", tokenizer, "Qwen/Qwen3-0.6B"), TemplateRenderer)


def test_renderers_that_do_not_exist_or_fit_are_named(tokenizer: Any, plain_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout.renderer is 'qwen9': expected auto, template, deepseek"):
        make_renderer("qwen9", tokenizer, "m")
    with pytest.raises(ConfigError, match="'qwen3' does not fit the tokenizer of m"):
        make_renderer("qwen3", plain_tokenizer, "m")


def test_without_the_package_only_a_template_without_tools_works(
    plain_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(extras.MODULES, "agents", ("no_such_module",))
    assert make_renderer("template", plain_tokenizer, "m").render(HI, None)
    with pytest.raises(ConfigError, match=r"async-rl\[agents\]"):
        make_renderer("auto", plain_tokenizer, "m")


def test_a_tokenizer_without_a_template_serves_tokens_only(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(tmp_path)
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template: generate from token_ids"):
        make_renderer("auto", tokenizer, "m").render(HI, None)


def test_what_a_template_refuses_is_an_invalid_request(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(tmp_path, template="{{ raise_exception('users first') }}")
    with pytest.raises(InvalidRequest, match="users first"):
        make_renderer("template", tokenizer, "m").render(HI, None)


@pytest.mark.parametrize("name", sorted(set(MODEL_RENDERER_MAP.values())))
def test_every_known_renderer_keeps_thinking(name: str) -> None:
    config: Any = config_from_name(name)
    assert type(config)(thinking_retention="all").thinking_retention == "all"
