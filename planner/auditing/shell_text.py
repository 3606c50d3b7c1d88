"""A launch line that is one quoted text: the words that the shell would make of it. Nothing is run.

Source: POSIX.1-2024, Shell Command Language, 2.2 quoting, 2.6 expansions, 2.7 redirection.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLE = r"\$\{(?P<braced>\w+)(?::?-(?P<default>[^{}$]*))?\}|\$(?P<name>[A-Za-z_]\w*)"
_COMMAND = r"\$\([^()]*\)|`[^`]*`"
_TARGET = r"""(?:&?\d(?=\s|$)|"[^"]*"|'[^']*'|[^\s&|;<>()'"]+)"""
_OUTSIDE = re.compile(
    rf"""(?P<single>'[^']*')|(?P<double>"(?:\\.|[^"\\])*")|\\.|{_VARIABLE}|(?P<command>{_COMMAND})|"""
    rf"(?P<redirection>(?:(?<!\S)\d)?(?:&>>?|>>?&?|<)[ \t]*{_TARGET})",
    re.S,
)
_OPERATORS = "();<>|&"
_HIDDEN = {ord(sign): 0xE000 + ord(sign) for sign in _OPERATORS}
"""Signs of the shell that stand in quotes, as characters of the private use area while the words are cut."""
_SHOWN = {hidden: sign for sign, hidden in _HIDDEN.items()}
_INSIDE = re.compile(rf"\\.|{_VARIABLE}", re.S)


def shell_words(text: str, environment: Mapping[str, str]) -> tuple[list[str], bool]:
    """The words of one command, and whether the shell is needed to run it: redirections, a pipe, &, or what is not known here.

    A variable that is not set stays as it is written ($X), and so does what a command would print. Problem where the text holds
    more than one command.
    """
    found: list[bool] = []

    def known(match: re.Match[str]) -> str | None:
        value = _value(match, environment)
        if value is None and match[0].startswith("$"):
            found.append(True)
        return value

    def inside(match: re.Match[str]) -> str:
        value = known(match)
        return match[0] if value is None else re.sub(r'([\\"$`])', r"\\\1", value)

    def outside(match: re.Match[str]) -> str:
        if match["redirection"]:
            found.append(True)
            return " "
        if match["double"]:
            return _INSIDE.sub(inside, match["double"]).translate(_HIDDEN)
        if match["single"]:
            return match["single"].translate(_HIDDEN)
        if match["command"]:
            found.append(True)
            return shlex.quote(match["command"]).translate(_HIDDEN)
        value = known(match)
        return match[0] if value is None else " ".join(map(shlex.quote, value.split())).translate(_HIDDEN)

    expanded = _OUTSIDE.sub(outside, re.sub(r"\\\r?\n", " ", text).strip())
    try:
        lexer = shlex.shlex(expanded, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = ""
        words = list(lexer)
    except ValueError as error:
        raise Problem(f"the line cannot be read ({str(error).lower()})") from error
    if words and words[-1] == "&":
        words.pop()
        found.append(True)
    piped = next((index for index, word in enumerate(words) if word in ("|", "|&")), 0)
    if piped:
        words = words[:piped]
        found.append(True)
    operators = [word for word in words if word and set(word) <= set(_OPERATORS)]
    if operators:
        raise Problem(f"the line holds the shell's {operators[0]!r}; give one command alone")
    return [word.translate(_SHOWN) for word in words], bool(found)


def is_open(word: str) -> bool:
    """A variable that is not set here, or what a command would print: nothing is known of it."""
    return bool(re.match(r"\$[\w{(]|`", word))


def _value(match: re.Match[str], environment: Mapping[str, str]) -> str | None:
    """What stands in the place of a variable; None where it is not set, or the match is none."""
    name = match["braced"] or match["name"]
    return None if name is None else environment.get(name, match["default"])
