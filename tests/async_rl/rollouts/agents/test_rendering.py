"""Which renderer a model gets, what is said where there is none, and the tokens between what was sampled."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import config_from_name
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from async_rl.errors import ConfigError
from async_rl.rollouts.agents.known_rendering import KnownRenderer
from async_rl.rollouts.agents.messages import InvalidRequest
from async_rl.rollouts.agents.rendering import Renderer, TemplateRenderer, make_renderer
from async_rl.rollouts.agents.turn import parsed_message
from async_rl.rollouts.agents.turn_tree import Conversation, TurnTree
from async_rl.shared.programs import extras
from tests.support.chat_tokenizer import make_chat_tokenizer
from tests.support.groups import make_response

HI = [{"role": "user", "content": "hi"}]


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
    with pytest.raises(ConfigError, match=r"rollout.options.renderer is 'qwen9': expected auto, template, deepseek"):
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


SPECIAL = ["<pad>", "</s>", "<unk>", "<|other_end|>"]
MARKED = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}</s>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
UNMARKED = """{% for m in messages %}{{ m.role }}:
{{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:
{% endif %}"""
CORPUS = ["<|user|>\nwhat is it</s>\n", "user:\n\nask again</search>\n", "<|assistant|>\nso it is\n\n"] * 9
STOP = "</search>"
SAID = {"end": "so", "other end": "so", "length": "as", "length, line": "as\n", "space": " so", "stop": f"ask{STOP}"}
"""What the policy says, one token a character, for each way in which a turn may end (or begin)."""
ENDS = {"end": "</s>", "other end": "<|other_end|>", "space": "</s>"}


def space_marked(kind: str) -> tuple[Tokenizer, trainers.Trainer]:
    """Tokenizers that write spaces as a letter, which they put before a text, or before any part of one, too."""
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer: trainers.Trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>")
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=SPECIAL)
    if kind == "prepend":
        spaces = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    else:
        scheme = "always" if kind == "metaspace always" else "first"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=kind == "unigram")
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, trainer


@pytest.fixture(
    scope="module", params=["byte level", "metaspace first", "metaspace always", "prepend", "unigram"], name="encoder"
)
def make_encoder(request: pytest.FixtureRequest) -> Any:
    if request.param == "byte level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: trainers.Trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet
        )
    else:
        tokenizer, trainer = space_marked(request.param)
    tokenizer.train_from_iterator(CORPUS, trainer)
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def letters(tokenizer: Any, text: str) -> list[int]:
    """The tokens of the letters, each alone."""
    written = {" ": ("▁", "Ġ"), "\n": ("\n", "Ċ")}
    vocab = tokenizer.get_vocab()
    return [next(vocab[each] for each in written.get(letter, (letter,)) if each in vocab) for letter in text]


def talk(tokenizer: Any, renderer: Renderer, ending: str, num_turns: int = 3) -> list[tuple[int, ...]]:
    """The tokens between what is sampled, of a conversation whose turns all end this way."""
    turn_tree = TurnTree(renderer)
    end = [tokenizer.convert_tokens_to_ids(ENDS[ending])] if ending in ENDS else []
    sampled = (*letters(tokenizer, SAID[ending]), *end)
    messages: list[Any] = [{"role": "user", "content": "what is it"}]
    found = []
    request = turn_tree.request(Conversation.of(messages))
    for number in range(num_turns):
        message, calls = renderer.parse(request.context, sampled, None)
        message = parsed_message(message, calls, [STOP], ("turn", number))
        assert STOP not in message["content"]
        node = turn_tree.add(request, make_response(sampled), message)
        recorded = request.context + sampled
        messages += [message, {"role": "user", "content": "again"}]
        request = turn_tree.request(Conversation.of(messages))
        assert request.parent is node, "the turn is continued"
        assert request.context[: len(recorded)] == recorded
        found.append(request.context[len(recorded) :])
    (whole,) = turn_tree.responses(())
    assert whole.num_sampled == num_turns * len(sampled)
    return found


@pytest.mark.parametrize("ending", SAID)
def test_what_follows_a_turn_has_the_tokens_of_the_whole_rendering(encoder: Any, ending: str) -> None:
    encoder.chat_template = MARKED
    other = encoder.convert_tokens_to_ids("<|other_end|>")
    added = talk(encoder, TemplateRenderer(encoder, [other]), ending)
    said = {"role": "assistant", "content": SAID[ending] + ENDS.get(ending, "").replace("</s>", "")}
    for number, token_ids in enumerate(added):
        messages = [*HI, *([said, {"role": "user", "content": "again"}] * (number + 1))]
        text = encoder.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        whole = encoded(encoder, text)
        closes = [place for place, token in enumerate(whole) if token == encoder.eos_token_id]
        assert token_ids == whole[closes[2 * number + 1] + (ENDS.get(ending) == "</s>") :]


@pytest.mark.parametrize("ending", SAID)
def test_a_template_without_special_tokens_is_continued(encoder: Any, ending: str) -> None:
    encoder.chat_template = UNMARKED
    other = encoder.convert_tokens_to_ids("<|other_end|>")
    for token_ids in talk(encoder, TemplateRenderer(encoder, [other]), ending):
        following = "\nuser:\nagain\nassistant:\n"
        # After an end token, what such a tokenizer puts before each part of a text belongs there.
        expected = encoded(encoder, ENDS.get(ending, "x") + following)[len(encoded(encoder, ENDS.get(ending, "x"))) :]
        assert token_ids == expected


@pytest.mark.parametrize("name", ["template", "qwen3"])
@pytest.mark.parametrize("ending", ["length", "stop"])
def test_any_renderer_continues_a_turn_that_its_end_token_does_not_end(tokenizer: Any, name: str, ending: str) -> None:
    for token_ids in talk(tokenizer, make_renderer(name, tokenizer, "m"), ending):
        assert tokenizer.decode(token_ids).startswith("<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n")
