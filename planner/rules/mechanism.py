"""What a lint rule is: a function that yields hits, and a docstring that is its page and its first tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from dsplan.schemas.finding import Edit, Fix, Moment, Reader, Severity, Span

ERROR: Severity = "error"
WARNING: Severity = "warning"
INFO: Severity = "info"


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule found: a Finding but for what the rule's registration and the document add.

    pointer names the value. on_key: the key is what is wrong, not its value. severity and raises None: the rule's own.
    """

    pointer: str
    message: str
    remedy: str = ""
    on_key: bool = False
    severity: Severity | None = None
    fix: Fix | None = None
    span: Span | None = None
    about: Reader | None = None
    raises: Moment | Literal["never"] | None = None


Check = Callable[..., Iterator[Hit]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. `needs` are the names of its parameters: what must be there for it to run."""

    id: str
    name: str
    severity: Severity
    keys: tuple[str, ...]
    check: Check
    needs: tuple[str, ...]
    raises: Moment | None = None
    """When the reader raises on what the rule finds; None: never, or each hit says it."""

    @property
    def summary(self) -> str:
        return _page_of(self.check)[0]

    def section(self, name: str) -> tuple[str, ...]:
        """What stands under Why, Given, Since, Until, Bad, Good, Fix or Source; a heading may be there several times."""
        return _page_of(self.check)[1].get(name, ())

    @property
    def fix(self) -> str:
        """safe, unsafe or none."""
        return (self.section("Fix") or ("none",))[0].split()[0].rstrip(".,;:")


RULES: dict[str, Rule] = {}
"""By id, in the order of the ids."""


def holding(rules: Iterable[Rule], release: str | None) -> Iterator[Rule]:
    """The rules that are true of that release (None: of the newest), by the Since and Until of their pages.

    Since: the first release of which the rule is true. Until: the first of which it no longer is.
    """
    for rule in rules:
        page = rule.check.__doc__ or ""
        if not ("\n    Since:" in page or "\n    Until:" in page):
            yield rule
        elif release is None:
            if not rule.section("Until"):
                yield rule
        else:
            since, until = rule.section("Since") or ("0",), rule.section("Until") or ("999",)
            if _order(since[0]) <= _order(release) < _order(until[0]):
                yield rule


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part)


def rule(
    id: str, name: str, *, severity: Severity, keys: list[str], raises: Moment | None = None
) -> Callable[[Check], Check]:
    """Registers a function as a rule. Its docstring is read when its page is asked for, not before."""

    def register(check: Check) -> Check:
        assert id not in RULES, f"{id} is registered twice"
        code = check.__code__
        needs = code.co_varnames[: code.co_argcount]
        RULES[id] = Rule(id=id, name=name, severity=severity, keys=tuple(keys), check=check, needs=needs, raises=raises)
        return check

    return register


@cache
def _page_of(check: Check) -> tuple[str, dict[str, tuple[str, ...]]]:
    import inspect

    return read_page(inspect.getdoc(check) or "")


def read_page(docstring: str) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The one-line fact and the sections of a rule's docstring. Lines that are indented more continue a section."""
    import re

    title = re.compile(r"(Why|Given|Since|Until|Bad|Good|Fix|Source):\s*(.*)")
    summary, _, rest = docstring.partition("\n\n")
    found: list[tuple[str, list[str]]] = []
    for line in rest.splitlines():
        heading = title.match(line)
        if heading:
            found.append((heading[1], [heading[2]]))
        elif line.strip() and found:
            found[-1][1].append(line[8:] if line.startswith(" " * 8) else line.strip())
    sections: dict[str, tuple[str, ...]] = {}
    for name, lines in found:
        joiner = "\n" if name in ("Bad", "Good") else " "
        sections[name] = (*sections.get(name, ()), joiner.join(lines).strip())
    return " ".join(summary.split()), sections


def replaced(span: tuple[int, int], text: str, *, safe: bool = True) -> Fix:
    """A fix that replaces the characters of the span."""
    return Fix(safe=safe, edits=(Edit(start=span[0], end=span[1], text=text),))


def run(rule: Rule, context: Mapping[str, Any]) -> list[Hit]:
    """The rule's hits. The context must hold all that it needs."""
    return list(rule.check(**{name: context[name] for name in rule.needs}))
