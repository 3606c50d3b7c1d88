"""Jinja's blocks in a template: what is left once one branch of each {% if %} is taken."""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_RENDERINGS = 4
"""Branches of one {% if %} that are tried."""
_TAG = re.compile(r"\{#.*?#\}|\{%[-+]?\s*(?P<word>\w+)(?P<rest>.*?)[-+]?%\}", re.DOTALL)
_NOT = re.compile(r"not\s+(?P<condition>[\w.]+)\s*\Z")

Branch = tuple[str, int, int]
"""Its condition, "" for else, and the span of its text."""


def has_blocks(text: str) -> bool:
    return "{%" in text or "{#" in text


def renderings(text: str) -> list[str]:
    """The text as often as it takes to see the branches, each as long as before, without tags and the branches not taken.

    The first takes every condition for true, `not x` for false; the second the other way round. Of a loop its body once,
    as the first entry and the last. A rendering with nothing in it is left out.
    """
    bare = _TAG.sub(lambda match: blank(match[0]), text)
    chains = _chains(text)
    if not chains:
        return [bare]
    found = []
    for turn in range(min(max(map(len, chains)), MOST_RENDERINGS)):
        chars = list(bare)
        for chain in chains:
            condition = chain[0][0].strip()
            wanted = 0 if "loop." in condition else turn
            if _NOT.match(condition) and wanted < 2:
                wanted = 1 - wanted
            taken = min(wanted, len(chain) - 1)
            for index, (_, start, end) in enumerate(chain):
                if index != taken:
                    chars[start:end] = blank(text[start:end])
        found.append("".join(chars))
    return [one for one in dict.fromkeys(found) if one.strip()] or found[:1]


def blank(text: str) -> str:
    """As many spaces, with the same ends of lines."""
    return "".join(char if char in "\r\n" else " " for char in text)


def _chains(text: str) -> list[list[Branch]]:
    """The branches of each {% if %}, an empty one for the else that is not there. None at all where the tags do not pair."""
    done: list[list[Branch]] = []
    open_tags: list[list[Branch] | None] = []  # None for a loop
    for word, rest, start, end in _tags(text):
        if word in ("if", "for"):
            open_tags.append([(rest, end, end)] if word == "if" else None)
        elif word in ("elif", "else", "endif", "endfor"):
            if not open_tags:
                return []
            chain = open_tags[-1]
            if chain is None:
                if word == "endfor":
                    open_tags.pop()
                continue
            condition, begin, _ = chain[-1]
            chain[-1] = (condition, begin, start)
            if word == "endif":
                open_tags.pop()
                done.append(chain if chain[-1][0] == "" else [*chain, ("", start, start)])
            else:
                chain.append((rest if word == "elif" else "", end, end))
    return done if not open_tags else []


def _tags(text: str) -> Iterator[tuple[str, str, int, int]]:
    for match in _TAG.finditer(text):
        if match["word"]:
            yield match["word"], match["rest"], match.start(), match.end()
