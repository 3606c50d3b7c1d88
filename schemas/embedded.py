"""A configuration inside another file: a mapping of a YAML file, a dict literal of a Python file, each with its positions.

Nothing of the file is executed or imported. Values that only a run could tell are `open`.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dsplan.schemas.jinja import has_blocks, renderings
from dsplan.schemas.json_parser import MAX_DEPTH
from dsplan.schemas.positions import Document, Duplicate, SyntaxProblem, escape, shape
from dsplan.schemas.problem import Problem
from dsplan.schemas.templates import MARK

MOST_CHARACTERS = {"YAML": 200_000, "Python": 500_000}
"""What their parsers read within a second. Longer files hold data, not settings."""
MOST_NODES = 200_000
"""Members of a YAML file once its aliases are written out: more than any configuration has, soon counted."""


def yaml_document(text: str, pointer: str, name: str) -> Document:
    """The mapping at the pointer. SyntaxProblem where the text is no YAML, Problem where nothing stands there."""
    import yaml

    _check_length(text, "YAML", name)
    document = Document(text, "yaml")
    hidden, written = _yaml_template(text)
    loader = _yaml_loader(hidden, document, yaml)
    try:
        node = loader.get_single_node()
        _YamlReader(loader, document, yaml, written).read(node)
        document.open.update({at: written[start] for at, (start, _) in document.values_at.items() if start in written})
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        at = min(mark.index, len(text)) if mark is not None else 0
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SyntaxProblem(f"this is no YAML: {said}", document.lines.span(at, min(at + 1, len(text)))) from None
    except RecursionError:
        raise SyntaxProblem("nested too deep", document.lines.span(0, 1)) from None
    except ValueError as error:  # a date or number that Python cannot hold
        raise SyntaxProblem(f"this is no YAML: {error}", document.lines.span(0, 1)) from None
    finally:
        loader.dispose()
    return at_pointer(document, pointer, name)


_EXPRESSIONS = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|(?:^|[ \t])\#[^\n]*)"""
    r"""|(?P<open>(?:[^\s"'{}\[\],:#]*\{\{[^{}\n]*\}\}[^\s"'{}\[\],:#]*)+)""",
    re.MULTILINE,
)
"""Jinja's {{ x }} outside quotes and comments, with what is written against it."""


def _yaml_template(text: str) -> tuple[str, dict[int, str]]:
    """The text, as long as before, without Jinja: the first branch of its blocks; expressions quoted, and where each began."""
    written: dict[int, str] = {}

    def quoted(match: re.Match[str]) -> str:
        if match["open"] is None:
            return match[0]
        written[match.start()] = match[0]
        return f'"{MARK * (len(match[0]) - 2)}"'

    plain = next(iter(renderings(text))) if has_blocks(text) else text
    return (_EXPRESSIONS.sub(quoted, plain) if "{{" in plain else plain), written


def _yaml_loader(text: str, document: Document, yaml: Any) -> Any:
    try:
        return yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:  # control characters
        at = min(error.position, len(text))
        raise SyntaxProblem(
            f"this is no YAML: it may not hold the character {text[at : at + 1]!r}",
            document.lines.span(at, min(at + 1, len(text))),
        ) from None


def _check_length(text: str, language: str, name: str) -> None:
    most = MOST_CHARACTERS[language]
    if len(text) > most:
        raise Problem(
            f"{name}: has {len(text)} characters, more than the {most} that are read as {language}; "
            "put the configuration into a file of its own"
        )


def at_pointer(document: Document, pointer: str, name: str) -> Document:
    """The part of the document there. Problem where nothing is there, or what is there is no mapping."""
    if pointer and pointer not in document.values_at:
        above = pointer.rpartition("/")[0]
        while above and above not in document.values_at:
            above = above.rpartition("/")[0]
        there = document.at(above)
        keys = ", ".join(map(str, list(there)[:12])) if isinstance(there, dict) else ""
        beside = f"; {f'the keys of {above}' if above else 'its keys'} are {keys}" if keys else ""
        raise Problem(f"{name}: has no {pointer}{beside}")
    if pointer in document.open:
        raise Problem(
            f"{name}: {pointer} is {document.open[pointer]}, which is not known here; lint what it stands for"
        )
    part = document.part(pointer) if pointer else document
    if not isinstance(part.value, dict):
        if isinstance(part.value, str):
            raise Problem(f"{name}: {pointer} is {shape(part.value)}, no mapping; if it names a file, lint that file")
        raise Problem(f"{name}: {pointer or 'the top level'} is {shape(part.value)}, but must be a mapping")
    return part


class _YamlReader:
    """Walks over the nodes of one YAML text and notes each value with its place."""

    def __init__(self, loader: Any, document: Document, yaml: Any, written: Mapping[int, str]):
        self.loader, self.document, self.yaml, self.written = loader, document, yaml, written
        self.nodes = 0

    def read(self, node: Any) -> None:
        if node is None:
            self.document.value, self.document.values_at[""] = None, (0, 0)
        else:
            self.document.value = self.value(node, "", 0)

    def value(self, node: Any, pointer: str, depth: int) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MOST_NODES:
            what = f"nested more than {MAX_DEPTH} levels deep" if depth > MAX_DEPTH else "too many members"
            raise SyntaxProblem(what, self.document.lines.span(*_place(node)))
        start, end = self.document.values_at[pointer] = _place(node)
        if isinstance(node, self.yaml.MappingNode):
            return self.mapping(node, pointer, depth)
        if isinstance(node, self.yaml.SequenceNode):
            return [self.value(entry, f"{pointer}/{index}", depth + 1) for index, entry in enumerate(node.value)]
        if node.tag not in self.loader.yaml_constructors:  # a tag of the program that will read it
            self.document.open[pointer] = self.document.text[start:end]
            return None
        value = self.loader.construct_object(node)
        return value if value is None or isinstance(value, (bool, int, float, str)) else node.value

    def mapping(self, node: Any, pointer: str, depth: int) -> dict[str, Any]:
        own = {id(key_node) for key_node, _ in node.value}
        self.loader.flatten_mapping(node)  # writes << out
        into: dict[str, Any] = {}
        written: set[tuple[int, int]] = set()
        span = self.document.lines.span
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, self.yaml.ScalarNode) else "?"
            inner, place = f"{pointer}/{escape(key)}", _place(key_node)
            if place[0] in self.written:  # a key that nobody knows yet
                self.document.more.setdefault(pointer, self.written[place[0]])
                continue
            if key in into:
                first = self.document.keys_at[inner]
                if first in written:
                    self.document.duplicates.append(Duplicate(inner, span(*first), span(*place)))
                del into[key]
            if id(key_node) in own:
                written.add(place)
            self.document.keys_at[inner] = place
            into[key] = self.value(value_node, inner, depth + 1)
        return into


def _place(node: Any) -> tuple[int, int]:
    return node.start_mark.index, node.end_mark.index


def python_documents(text: str, target: str, name: str) -> list[tuple[str, Document]]:
    """Each dict literal that the text gives that name, with what to call it: NAME, or NAME:LINE where there are several.

    target: NAME or NAME:LINE. SyntaxProblem where the text is no Python, Problem where the name is given no dict literal.
    """
    _check_length(text, "Python", name)
    document = Document(text, "python")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.removeprefix("\ufeff"))
        found = list(_dicts(tree))
    except SyntaxError as error:
        line, column = error.lineno or 1, error.offset or 1
        starts = document.lines.starts
        at = min(starts[min(line, len(starts)) - 1] + column - 1, len(text))
        raise SyntaxProblem(
            f"this is no Python: {error.msg}", document.lines.span(at, min(at + 1, len(text)))
        ) from None
    except (RecursionError, MemoryError, ValueError):
        raise SyntaxProblem("nested too deep", document.lines.span(0, 1)) from None
    wanted, _, line_text = target.partition(":")
    nodes = [node for found_name, node in found if found_name == wanted]
    several = len(nodes) > 1
    if line_text:
        nodes = [node for node in nodes if str(node.lineno) == line_text]
    if not nodes:
        names = list(dict.fromkeys(found_name for found_name, _ in found))
        has = f"; it gives one to {', '.join(names[:12])}" if names else ""
        raise Problem(f"{name}: no dict literal is given to {target or 'a name'}{has}")
    documents = [(f"{wanted}:{node.lineno}" if several else wanted, _python_document(text, node)) for node in nodes]
    for _, document in documents:
        for written, pointer, is_value in _changes(tree, wanted, text):
            if is_value and pointer in document.values_at:
                document.open[pointer] = written
            else:
                document.more.setdefault(pointer.rpartition("/")[0] if is_value else pointer, written)
    return documents


_CHANGING = {"update", "setdefault", "pop", "clear", "popitem", "__setitem__"}
"""Methods of a dict that change it."""


def _changes(tree: ast.AST, name: str, text: str) -> Iterator[tuple[str, str, bool]]:
    """Where a program changes the dict of that name later: as it is written, which part, and whether that value alone."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            pointer = _part_of(node.func.value, name)
            if pointer is not None:
                yield ast.get_source_segment(text, node.func) or name, pointer, False
        for target in targets:
            pointer = _part_of(target, name)
            if pointer:
                yield ast.get_source_segment(text, target) or name, pointer, True
            elif pointer == "" and isinstance(node, ast.AugAssign):
                yield f"{name} |=", "", False


def _part_of(node: ast.expr, name: str) -> str | None:
    """The pointer of config["a"]["b"] into config; up to the first key that is no text. None where it is another's."""
    keys: list[str] = []
    while isinstance(node, ast.Subscript):
        key = node.slice
        keys = [key.value, *keys] if isinstance(key, ast.Constant) and isinstance(key.value, str) else []
        node = node.value
    called = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
    return "".join(f"/{escape(key)}" for key in keys) if called == name else None


def _dicts(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names and the dict literals that they are given: by assignment, or as a keyword argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets, value = [node.target], node.value
        elif isinstance(node, ast.keyword) and node.arg:
            targets, value = [ast.Name(node.arg)], node.value
        else:
            continue
        if not (isinstance(value, ast.Dict) or _is_dict_call(value)):
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, value
            elif isinstance(target, ast.Attribute):
                yield target.attr, value


def _is_dict_call(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args


def _python_document(text: str, node: ast.expr) -> Document:
    document = Document(text, "python")
    lines = text.removeprefix("\ufeff").encode().splitlines(keepends=True) if not text.isascii() else []

    def offset(line: int, byte: int) -> int:
        column = len(lines[line - 1][:byte].decode(errors="ignore")) if lines else byte
        return document.lines.starts[line - 1] + column

    def place(there: ast.AST) -> tuple[int, int]:
        at: Any = there
        return offset(at.lineno, at.col_offset), offset(at.end_lineno, at.end_col_offset)

    def value(there: ast.expr, pointer: str) -> Any:
        start, end = document.values_at[pointer] = place(there)
        if isinstance(there, ast.Dict):
            return members([(key, key, entry) for key, entry in zip(there.keys, there.values, strict=True)], pointer)
        if _is_dict_call(there):
            assert isinstance(there, ast.Call)
            words = [(ast.Constant(word.arg) if word.arg else None, word, word.value) for word in there.keywords]
            return members(words, pointer)
        if isinstance(there, (ast.List, ast.Tuple)):
            return [value(entry, f"{pointer}/{index}") for index, entry in enumerate(there.elts)]
        known = _constant(there)
        if known is _OPEN:
            document.open[pointer] = text[start:end]
            return None
        return known

    def members(parts: Sequence[tuple[ast.expr | None, Any, ast.expr]], pointer: str) -> dict[str, Any]:
        into: dict[str, Any] = {}
        for key, key_place, entry in parts:
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                start, end = place(entry if key is None else key_place)
                document.more.setdefault(pointer, ("**" if key is None else "") + text[start:end])
                continue  # what it adds is not known
            inner = f"{pointer}/{escape(key.value)}"
            start, end = place(key_place)
            place_of_key = (start, start + len(key.value)) if isinstance(key_place, ast.keyword) else (start, end)
            into.pop(key.value, None)  # Python keeps the last, and says nothing
            document.keys_at[inner] = place_of_key
            into[key.value] = value(entry, inner)
        return into

    document.value = value(node, "")
    return document


_OPEN = object()
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_LARGEST = 2**64


def _constant(node: ast.expr) -> Any:
    """The value of a literal, or of arithmetic on numbers such as 2 * 10**8; _OPEN for what only a run could tell."""
    if isinstance(node, ast.Constant):
        return node.value if node.value is None or isinstance(node.value, (bool, int, float, str)) else _OPEN
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        number = _constant(node.operand)
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _constant(node.left), _constant(node.right)
        plain = all(type(side) in (int, float) and abs(side) <= _LARGEST for side in (left, right))
        if plain and not (isinstance(node.op, ast.Pow) and abs(right) > 64):
            try:
                result = _ARITHMETIC[type(node.op)](left, right)
            except ArithmeticError:
                return _OPEN
            return result if isinstance(result, (int, float)) else _OPEN
    return _OPEN
