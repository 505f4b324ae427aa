"""The one parser of every command: options in any position, no abbreviations, and any key of the config as an option.

`--name value` and `--name=value` mean the same. An option with a value takes the next word, whatever it is, unless
that is itself an option of the command (then write `--name=value`). Words after `--` are positional. Keys of the
config are collected separately as words `--section.key=value`, which `async_rl.config.file.load_config` reads and
which can be passed on to other programs.
"""

import argparse
import io
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from pydantic import BaseModel

from async_rl.config.keys import Key, explain_unknown, find_key, keys_of, nearest, option_keys, options_of
from async_rl.config.other_names import translated

USAGE_ERROR = 2
"""Exit code of every mistake on the command line and in the config."""

KEYS_TITLE = "keys of the config, as --section.key VALUE; lists and tables in TOML or JSON"


class Parser(argparse.ArgumentParser):
    """A command's own options and, with `config`, every key of that model; `--help` lists them all.

    Arguments are declared with argparse's `add_argument`.
    """

    def __init__(self, prog: str, description: str, usage: str, config: type[BaseModel] | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            usage=f"{prog} {usage}".replace("%", "%%"),
            allow_abbrev=False,
            formatter_class=_Help,
        )
        self._config = config
        self._separate_rest = False
        self.overrides: tuple[str, ...] = ()
        """The keys of the config in the last parsed words, as words `--section.key=value`."""
        self.rest: tuple[str, ...] = ()
        """The words after `--`, for a command that keeps them separate."""

    def keep_rest(self) -> None:
        """Words after `--` are not for this command, but for a program that it starts: they become `rest`."""
        self._separate_rest = True

    # The argument's type is argparse's.
    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses the words after the program's name; on an invalid one, prints an error and exits with code 2."""
        _print_any_character()
        # The imports of a program are over: see `async_rl.shared.programs.start`.
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        words = sys.argv[1:] if args is None else list(args)
        options, positional, overrides, rest = self._sort(words)
        self.overrides = tuple(overrides)
        self.rest = tuple(rest) if self._separate_rest else ()
        if not self._separate_rest:
            positional += rest
        if positional and not self._get_positional_actions():
            own = ", ".join(option for option in self._option_string_actions if option.startswith("--"))
            self.error(f"unexpected {positional[0]!r}: there are {own}")
        return super().parse_args([*options, "--", *positional] if positional else options, namespace)

    def format_help(self) -> str:
        return super().format_help() + (_keys_help(self._config) if self._config else "")

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\nsee {self.prog} --help\n")

    def takes_value(self, name: str) -> bool:
        """Whether the option `name` has a value, as the next word or after `=`."""
        action = self._option_string_actions.get(name)
        return action.nargs != 0 if action else self._is_key(name)

    def _is_key(self, name: str) -> bool:
        return self._config is not None and find_key(self._config, name.removeprefix("--")) is not None

    def _is_option(self, word: str) -> bool:
        name = word.partition("=")[0]
        return name in self._option_string_actions or (name.startswith("--") and self._is_key(name))

    def _sort(self, words: list[str]) -> tuple[list[str], list[str], list[str], list[str]]:
        """Splits words into the command's own options, positional ones, keys of the config, and those after `--`."""
        options: list[str] = []
        positional: list[str] = []
        overrides: list[str] = []
        while words:
            word = words.pop(0)
            if word == "--":
                break
            name, equals, value = word.partition("=")
            if not self._is_option(word):
                self._require_positional(word)
                positional.append(word)
            elif not self.takes_value(name):
                options.append(word)
            else:
                value = value if equals else self._next_value(name, words)
                (overrides if self._is_key(name) else options).append(f"{name}={value}")
        return options, positional, overrides, words

    def _next_value(self, name: str, words: list[str]) -> str:
        takes = self._describe_value(name)
        if not words:
            self.error(f"{name} has no value: write {name} {takes}")
        if words[0] == "--" or self._is_option(words[0]):
            self.error(f"{name} has no value, {words[0]!r} follows: write {name} {takes}, or {name}={words[0]}")
        return words.pop(0)

    def _describe_value(self, name: str) -> str:
        key = find_key(self._config, name.removeprefix("--")) if self._config else None
        return key.takes if key else "VALUE"

    def _require_positional(self, word: str) -> None:
        """Ends the program if a word looks like an option, but is none of this command's."""
        name = word.partition("=")[0]
        if not name.startswith("--"):
            if name.startswith("-") and not _is_number(name) and name != "-":
                self.error(f"unknown option {name!r}: write words that start with a dash after `--`")
            return
        if self._config is not None and "." in name:
            key = name.removeprefix("--")
            self.error(f"unknown key {key!r}: {explain_unknown(self._config, key.split('.'))}")
        own = [option for option in self._option_string_actions if option.startswith("--")]
        keys = [f"--{key}" for key in (*keys_of(self._config), *option_keys(self._config))] if self._config else []
        # A bare --iterations means the key of that name in some section.
        same = [key for key in keys if key.endswith("." + name.removeprefix("--"))]
        near = nearest(name, own) or (same[0] if same else nearest(name, keys))
        if self._config is not None and not same and (other := translated(name.lstrip("-").replace("-", "_"))):
            self.error(f"unknown option {name!r}: {other}")
        self.error(f"unknown option {name!r}: {f'did you mean {near!r}?' if near else 'there are ' + ', '.join(own)}")


class Commands:
    """A command with subcommands, such as `async-rl fleet`; options may also come before the subcommand's name."""

    def __init__(self, prog: str, description: str, parsers: Mapping[str, Parser]) -> None:
        self._prog = prog
        self._description = description
        self._parsers = parsers

    def parse(self, words: Sequence[str]) -> tuple[str, argparse.Namespace]:
        """The subcommand's name and its arguments; exits with 2 on an invalid one, and with 0 after showing help."""
        command, others = self._split(words)
        if command is None:
            asked = any(word in ("-h", "--help") for word in words)
            print(self._usage(), file=sys.stdout if asked else sys.stderr)
            raise SystemExit(0 if asked else USAGE_ERROR)
        if command not in self._parsers:
            near = nearest(command, self._parsers)
            meant = f"did you mean {near!r}? " if near else ""
            print(
                f"{self._prog}: unknown command {command!r}: {meant}there are {', '.join(self._parsers)}",
                file=sys.stderr,
            )
            raise SystemExit(USAGE_ERROR)
        return command, self._parsers[command].parse_args(others)

    def _split(self, words: Sequence[str]) -> tuple[str | None, list[str]]:
        """The first word that is neither an option nor an option's value, and all others."""
        is_value = False
        for i, word in enumerate(words):
            if not word.startswith("-") and not is_value:
                return word, [*words[:i], *words[i + 1 :]]
            is_value = not is_value and "=" not in word and any(p.takes_value(word) for p in self._parsers.values())
        return None, list(words)

    def _usage(self) -> str:
        lines = [f"  {name:<10}{parser.description}" for name, parser in self._parsers.items()]
        return "\n".join([f"usage: {self._prog} COMMAND [ARGUMENTS]", "", self._description, "", *lines])


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def _keys_help(config: type[BaseModel]) -> str:
    """Every key of the config by section: its values, its default, its meaning."""
    keys = keys_of(config)
    lines = ["", f"{KEYS_TITLE}:"]
    for section in dict.fromkeys(key.section for key in keys.values()):
        own = [key for key in keys.values() if key.section == section]
        lines += ["", f"[{section}]", *_key_lines(own)]
        for key in own:
            if options := options_of(config, key):
                lines += ["", f"[{key.name}]", *_key_lines(options.values())]
    return "\n".join(lines) + "\n"


def _key_lines(keys: Iterable[Key]) -> list[str]:
    lines = []
    for key in keys:
        default = "required" if key.default is None else f"default {key.default}"
        lines += [f"  --{key.name} {key.takes}  ({default})", f"      {key.description}"]
    return lines


def _print_any_character() -> None:
    """A terminal without a character, as in a locale of Latin-1, gets its escape, and not an error in its place."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
