"""Mutation operators: the small slips of which kernels die, as edits of a Triton kernel's text.

Each operator looks at one node of the syntax tree and proposes other texts for it.  The text
around stays as it is, so that a mutant differs from the kernel in one place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.mutants.mutant import SLIGHT, Mutation

_COMPARISONS: Mapping[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
# A call by its name, and what it becomes: an extreme for the other, a base for the other.
_TWINS = {
    "tl.minimum": "tl.maximum",
    "tl.maximum": "tl.minimum",
    "tl.min": "tl.max",
    "tl.max": "tl.min",
    "tl.exp2": "tl.exp",
    "tl.log2": "tl.log",
    "min": "max",
    "max": "min",
}


@dataclass(frozen=True)
class _Source:
    """A text and where its lines begin."""

    text: str
    begins: tuple[int, ...]

    @staticmethod
    def of(text: str) -> _Source:
        begins = [0]
        for line in text.splitlines(keepends=True):
            begins.append(begins[-1] + len(line))
        return _Source(text, tuple(begins))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends; its columns count bytes of UTF-8."""
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._place(node.lineno, node.col_offset),
            self._place(node.end_lineno, node.end_col_offset),
        )

    def _place(self, line: int, column: int) -> int:
        begin = self.begins[line - 1]
        text = self.text[begin : self.begins[line]]
        return begin + len(text.encode()[:column].decode())

    def __call__(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]


# What an operator proposes for a node: its own name, start, end, and the new text.
_Proposal = tuple[str, int, int, str]
_Operator = Callable[[_Source, ast.AST], Iterator[_Proposal]]


def functions_of(text: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file that run on a device: those that triton.jit decorates, and those that
    the file hands to `twice` or to triton.jit."""
    tree = ast.parse(text)
    handed = {
        call.args[0].id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("twice", "triton.jit")
        and call.args
        and isinstance(call.args[0], ast.Name)
    }
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and (
            node.name in handed
            or any(ast.unparse(each) == "triton.jit" for each in node.decorator_list)
        )
    }


def mutations(text: str, hosts: tuple[str, ...] = ()) -> list[Mutation]:
    """All mutations of a file's device functions, and of its functions of these names, in the order
    of the text; none twice, and none that leaves the syntax tree as it is."""
    source, tree = _Source.of(text), ast.parse(text)
    functions = functions_of(text)
    functions |= {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in hosts
    }
    found: list[Mutation] = []
    for function in functions.values():
        places = _places(source, function)
        seen = {(begin, _shape(text[begin:last])) for begin, last in places}
        for node in _nodes(function):
            for operator in OPERATORS:
                for kind, start, end, after in operator(source, node):
                    begin, last = next(each for each in places if each[0] <= start < end <= each[1])
                    try:
                        shape = begin, _shape(text[begin:start] + after + text[end:last])
                    except SyntaxError:
                        continue
                    if shape in seen:
                        continue
                    seen.add(shape)
                    line = text.count("\n", 0, start) + 1
                    found.append(Mutation(kind, function.name, line, start, end, after))
    return found


def _places(source: _Source, function: ast.FunctionDef) -> list[tuple[int, int]]:
    """Where the parts of a function begin and end that are parsed alone, since the whole takes ten
    times as long: its simple statements, with their indents, each on lines of its own; and
    the function, for what is in none of these."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            begin, last = source.span(node)
            line = source.begins[node.lineno - 1]
            if source.text[line:begin].isspace():
                found.append((line, last))
    return [*found, source.span(function)]


def _shape(text: str) -> str:
    """The syntax tree of a function or of an indented statement."""
    return ast.dump(ast.parse(f"if True:\n{text}" if text[0] == " " else text))


def _nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of its body, its docstring and annotations left out."""
    queue: list[ast.AST] = list(function.body[ast.get_docstring(function) is not None :])
    while queue:
        node = queue.pop(0)
        yield node
        for name, value in ast.iter_fields(node):
            if name == "annotation" or (name == "args" and _is_shape(node)):
                continue
            queue += [
                each
                for each in (value if isinstance(value, list) else [value])
                if isinstance(each, ast.AST)
            ]


def _is_shape(node: ast.AST) -> bool:
    """Whether the arguments of a call are a shape, an axis or a dtype: with others it does not
    compile, as a rule."""
    makers = ("tl.zeros", "tl.arange", "tl.program_id")
    return isinstance(node, ast.Call) and ast.unparse(node.func) in makers


def _comparison(source: _Source, node: ast.AST) -> Iterator[_Proposal]:
    """A bound that is in for one that is out, and the other way round."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        before, after = _COMPARISONS.get(type(node.ops[0]), ("", ""))
        if before:
            start, end = source.span(node.left)[1], source.span(node.comparators[0])[0]
            between = source.text[start:end].replace(before, after, 1)
            yield "comparison", start, end, between


def _boundary(source: _Source, node: ast.AST) -> Iterator[_Proposal]:
    """An integer that is one too large or too small; an end of a loop."""
    if isinstance(node, ast.Constant) and type(node.value) is int and not _is_axis(source, node):
        start, end = source.span(node)
        yield "boundary", start, end, str(node.value + 1)
        if node.value > 0:
            yield "boundary", start, end, str(node.value - 1)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "range":
        last = node.args[min(1, len(node.args) - 1)]
        start, end = source.span(last)
        yield "boundary", start, end, f"({source(last)}) - 1"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.cdiv", "triton.cdiv"):
        start, end = source.span(node)
        yield "boundary", start, end, f"({source(node.args[0])}) // ({source(node.args[1])})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        start, end = source.span(node)
        left, right = source(node.left), source(node.right)
        yield "boundary", start, end, f"(({left}) + ({right}) - 1) // ({right})"


def _is_axis(source: _Source, node: ast.AST) -> bool:
    """Whether an integer is the axis of a reduction."""
    start, end = source.span(node)
    begin = source.text.rfind("\n", 0, start)
    before, after = source.text[begin:start], source.text[end : end + 1]
    return after == ")" and bool(
        re.search(r"tl\.(sum|max|min)\([^()]*(\([^()]*\))*[^()]*, $", before)
    )


def _arithmetic(source: _Source, node: ast.AST) -> Iterator[_Proposal]:
    """A sign, or an operand that is lost: a factor, an offset, a half of a condition."""
    if not isinstance(node, ast.BinOp):
        return
    start, end = source.span(node)
    left, right = source(node.left), source(node.right)
    between = source.text[source.span(node.left)[1] : source.span(node.right)[0]]
    kind = "mask" if isinstance(node.op, ast.BitAnd) else "operand"
    if isinstance(node.op, ast.Add | ast.Sub):
        old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
        yield "sign", start, end, f"{left}{between.replace(old, new, 1)}{right}"
    if isinstance(
        node.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv | ast.Mod | ast.BitAnd
    ):
        yield kind, start, end, f"({left})"
    if isinstance(node.op, ast.Add | ast.Mult | ast.BitAnd):
        yield kind, start, end, f"({right})"


def _call(source: _Source, node: ast.AST) -> Iterator[_Proposal]:
    """A function for its twin; a choice that is always the same; a load or store without its mask,
    or with another filling."""
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    start, end = source.span(node)
    if name in _TWINS:
        first, last = source.span(node.func)
        yield "function", first, last, _TWINS[name]
    if name == "tl.where" and len(node.args) == 3:
        yield "mask", start, end, f"({source(node.args[1])})"
        yield "mask", start, end, f"({source(node.args[2])})"
    if name == "tl.trans":
        yield "index", start, end, f"({source(node.args[0])})"
    if name == "float" and ast.unparse(node.args[0]) == "'-inf'":
        yield "constant", start, end, "-65504.0"
        yield "constant", start, end, "0.0"
    for keyword in node.keywords:
        first, last = source.span(keyword)
        if keyword.arg == "mask" and name in ("tl.load", "tl.store"):
            yield "mask", *source.span(keyword.value), "None"
        elif keyword.arg == "other":
            yield "mask", first, last, "other=1.0"
        elif keyword.arg == "input_precision":
            yield "dtype", first, last, 'input_precision="tf32"'
        elif keyword.arg in ("boundary_check", "padding_option"):
            yield "mask", first, last + _comma(source.text, last), ""


def _comma(text: str, end: int) -> int:
    """How many characters a comma takes that follows there."""
    found = re.match(r"\s*,", text[end:])
    return found.end() if found else 0


def _dtype(source: _Source, node: ast.AST) -> Iterator[_Proposal]:
    """A cast that is lost, an accumulator of 16 bits."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
    ):
        yield "dtype", *source.span(node), f"({source(node.func.value)})"
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "tl.float32":
        yield "dtype", *source.span(node), "tl.float16"


def _index(source: _Source, node: ast.AST) -> Iterator[_Proposal]:
    """Rows for columns."""
    if isinstance(node, ast.Subscript):
        inside = ast.unparse(node.slice)
        twins = {"(:, None)": "None, :", "(None, :)": ":, None"}
        if inside in twins:
            yield "index", *source.span(node.slice), twins[inside]


def _constant(source: _Source, node: ast.AST) -> Iterator[_Proposal]:
    """A constant of a formula that is slightly off, or another neutral element."""
    if isinstance(node, ast.Constant) and isinstance(node.value, float):
        start, end = source.span(node)
        value = node.value
        other = {0.0: 1.0, 1.0: 0.0}.get(value, value * SLIGHT)
        yield "constant", start, end, repr(other)


def _statement(source: _Source, node: ast.AST) -> Iterator[_Proposal]:
    """A step that is left out, a branch that is always or never taken."""
    if isinstance(node, ast.AugAssign | ast.Expr) or _again(source, node):
        yield "statement", *source.span(node), "pass"
    if isinstance(node, ast.If | ast.IfExp):
        yield "branch", *source.span(node.test), "True"
        yield "branch", *source.span(node.test), "False"


def _again(source: _Source, node: ast.AST) -> bool:
    """Whether a statement gives a new value to a name that has one: without the statement others
    still run."""
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
        return False
    begin = source.span(node)[0]
    function = source.text.rfind("\ndef ", 0, begin)
    return bool(re.search(rf"\b{node.targets[0].id}\b", source.text[function:begin]))


OPERATORS: tuple[_Operator, ...] = (
    _comparison,
    _boundary,
    _arithmetic,
    _call,
    _dtype,
    _index,
    _constant,
    _statement,
)
