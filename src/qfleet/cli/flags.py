"""Reads flags: splits the words of a command line, finds the setting that each flag names, and reads its value."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from qfleet.cli.settings import REQUIRED, Setting, expected, settings_of
from qfleet.core.config import Config, describe
from qfleet.core.errors import ConfigError, did_you_mean

_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)")
_BRACKETED = re.compile(r"\[(.*)\]|\((.*)\)")
_NEAR = 0.5
"""Likeness of names from which one is suggested for the other."""
_SAME_END = 0.25
"""What an equal last part adds to the likeness."""
O = TypeVar("O", bound=Config)  # noqa: E741  (options)


@dataclass(frozen=True)
class Given:
    """A flag as it was typed, with the words up to the next flag."""

    flag: str
    texts: tuple[str, ...]

    @property
    def name(self) -> str:
        """The dotted name of the setting that is meant."""
        return self.flag.removeprefix("--").replace("-", "_")

    def refuse(self, texts: Iterable[str], reason: str) -> ConfigError:
        """Return the error that says what is wrong with the value of this flag."""
        return ConfigError(f"'{self.flag}' = '{' '.join(texts)}': {reason}")


def flag_of(name: str) -> str:
    """Return the flag of a dotted setting."""
    return f"--{name.replace('_', '-')}"


def wants_help(words: Sequence[str]) -> bool:
    """Return whether help is asked for."""
    return "--help" in words or "-h" in words


def split_words(words: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Return the words before the first flag, and the flags; `--flag=value` and `--flag value ...` mean the same.

    A flag that occurs twice is refused: nobody can tell which one was meant.
    """
    loose: list[str] = []
    given: list[Given] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, text = word.partition("=")
            given.append(Given(flag, (text,) if equals else ()))
        elif word.startswith("-") and word != "-" and not _NEGATIVE.match(word):
            raise ConfigError(f"unknown flag '{word}': flags begin with two dashes")
        elif given:
            given[-1] = dataclasses.replace(given[-1], texts=(*given[-1].texts, word))
        else:
            loose.append(word)
    names = [one.name for one in given]
    for one in given:
        if names.count(one.name) > 1:
            raise ConfigError(f"'{one.flag}' is given {names.count(one.name)} times; give it once")
    return loose, given


def unknown_flag(flag: Given, known: Iterable[str], otherwise: str = "") -> ConfigError:
    """Return the error for a flag that names no setting, with the nearest one, or what to say where none is near."""

    def nearness(name: str) -> float:
        same_end = name.rpartition(".")[2] == flag.name.rpartition(".")[2]
        # People often forget the section, and mix up dots and dashes.
        alike = difflib.SequenceMatcher(None, flag.name.replace(".", "_"), name.replace(".", "_")).ratio()
        return alike + (_SAME_END if same_end else 0.0)

    nearest = max(known, key=nearness, default=None)  # a verb may have no flag at all
    hint = f" Did you mean '{flag_of(nearest)}'?" if nearest and nearness(nearest) >= _NEAR else otherwise
    return ConfigError(f"unknown flag '{flag.flag}'.{hint}")


def read_value(setting: Setting, flag: Given, texts: Sequence[str]) -> Any:
    """Return the value that a flag's words stand for; its range is not checked here."""
    wanted = expected(setting.annotation)
    if not texts:
        raise ConfigError(f"'{flag.flag}' needs a value: {wanted}")
    if len(texts) > 1 and not takes_several(setting.annotation):
        raise ConfigError(f"unexpected '{texts[1]}' after '{flag.flag} {texts[0]}', which should be {wanted}")
    if _is_path(setting.annotation):
        _check_path(flag.flag, texts[0])
    try:
        return _parse(setting.annotation, texts)
    except SystemExit:
        raise flag.refuse(texts, f"should be {wanted}{_hint(setting.annotation, texts[0])}") from None


def takes_several(annotation: Any) -> bool:
    """Return whether a value is made of several words."""
    return get_origin(annotation) in (tuple, dict)


def parse_options(model: type[O], words: Sequence[str], positional: str, usage: str) -> O:
    """Return a verb's own options; the words that belong to no flag are the value of the field `positional`.

    Boolean options are switches: they take no value.
    """
    settings = {setting.name: setting for setting in settings_of(model, {})}
    loose, given = split_words(words)
    values: dict[str, Any] = {}
    for flag in given:
        if flag.name not in settings or flag.name == positional:
            raise unknown_flag(flag, [name for name in settings if name != positional], f" Usage: {usage}")
        value, rest = read_option(settings[flag.name], flag)
        values[flag.name] = value
        loose += rest
    if positional:
        values |= _positional(settings[positional], loose, usage)
    elif loose:
        raise ConfigError(f"unexpected '{loose[0]}'; usage: {usage}")
    return build_options(model, values)


def read_option(setting: Setting, flag: Given) -> tuple[Any, Sequence[str]]:
    """Return the value of one of a verb's own options, and the words after it that do not belong to it."""
    if setting.annotation is bool:
        if flag.texts and flag.texts[0] in ("True", "False"):
            raise ConfigError(f"'{flag.flag}' is a switch and takes no value")
        return True, flag.texts
    return read_value(setting, flag, flag.texts[:1]), flag.texts[1:]


def own_options(model: type[O], given: Sequence[Given]) -> tuple[O, list[Given], list[str]]:
    """Return the options of a verb itself, the other flags, which are settings of an experiment, and loose words.

    These stood behind an option and are none of its values.
    """
    settings = {setting.name: setting for setting in settings_of(model, {})}
    values: dict[str, Any] = {}
    loose: list[str] = []
    for flag in given:
        if flag.name in settings:
            values[flag.name], rest = read_option(settings[flag.name], flag)
            loose += rest
    return build_options(model, values), [flag for flag in given if flag.name not in settings], loose


def build_options(model: type[O], values: dict[str, Any]) -> O:
    """Return validated options."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error, model)) from None


def _positional(setting: Setting, words: Sequence[str], usage: str) -> dict[str, Any]:
    if _is_path(setting.annotation):
        for word in words:
            _check_path(setting.name.upper(), word)
    if takes_several(setting.annotation):
        return {setting.name: tuple(words)}
    if len(words) > 1:
        raise ConfigError(f"unexpected '{words[1]}'; usage: {usage}")
    if not words and setting.default is REQUIRED:
        raise ConfigError(f"{setting.name.upper()} is missing; usage: {usage}")
    return {setting.name: words[0]} if words else {}


def _check_path(what: str, text: str) -> None:
    """Refuse a text that no file or directory has as its path; `Path` would take the empty one for the present one."""
    if not text or "\0" in text:
        raise ConfigError(f"'{what}' = {text!r}: should be a path, such as runs/first")


def _is_path(annotation: Any) -> bool:
    return Path in (annotation, *get_args(annotation))


def _parse(annotation: Any, texts: Sequence[str]) -> Any:
    """Return what tyro makes of some words; raises SystemExit if it cannot."""
    import tyro

    if takes_several(annotation):
        if len(texts) == 1:
            inner = _BRACKETED.fullmatch(texts[0])
            texts = re.split(r"[\s,=]+", (inner[1] or inner[2] or "") if inner else texts[0])
        words = ["--value", *(text for text in texts if text)]
    else:
        words = [f"--value={texts[0]}"]
    holder = dataclasses.make_dataclass("Holder", [("value", annotation)])
    # tyro explains itself at length on the terminal; the caller says it in one line.
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return tyro.cli(
            holder, args=words, config=(tyro.conf.FlagConversionOff,), add_help=False, console_outputs=False
        ).value


def _hint(annotation: Any, text: str) -> str:
    choices = [
        str(choice)
        for part in (annotation, *get_args(annotation))
        if get_origin(part) is Literal
        for choice in get_args(part)
    ]
    if choices:
        return "." + did_you_mean(text, choices)
    if int in (annotation, *get_args(annotation)):
        with contextlib.suppress(ValueError, OverflowError):
            return f", such as {int(float(text))}"
    return ""
