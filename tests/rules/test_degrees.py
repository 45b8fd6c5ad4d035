"""Nothing is divided by the number of processes outside training_estimates/degrees.py: samples have a degree
of their own."""

import ast
from collections import defaultdict

import pytest

from tests.support.paths import ROOT
from tests.support.sources import files, name_of, tree_of

FILES = files("flytune", "training_estimates", "tasks", "workflows", "flyte2")
DEGREES = ROOT / "training_estimates/degrees.py"
# Names and attributes that are the number of all processes, upstream's too, and functions that return it.
NUMBERS = {"world_size", "num_processes"}
CALLED = {"get_world_size"}
# Functions whose result is a number of processes if an argument is, and those that divide by their second
# argument.
ARITHMETIC = {"getattr", "int", "float", "max", "min", "abs", "round", "Fraction", "Decimal"}
DIVIDING = {"divmod", "fmod", "remainder", "floordiv", "truediv", "mod", "Fraction"}
DIVISIONS = (ast.Div, ast.FloorDiv, ast.Mod)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# All nodes that matter here.
SEEN = (*FUNCTIONS, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.comprehension)
SEEN += (ast.Call, ast.Dict, ast.BinOp, ast.Slice)


def last_name(function):
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def inside(scope):
    """Yield the nodes of a scope, without those of functions in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, FUNCTIONS):
            yield from inside(child)


def parameters(function):
    return [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]


class Numbers:
    """Names of the number of processes in some files, followed through assignments, arguments and fields
    until none is new."""

    def __init__(self, trees):
        self.trees = trees
        self.attributes = set(NUMBERS)
        self.names = defaultdict(lambda: set(NUMBERS))
        self.functions, self.fields = defaultdict(list), defaultdict(list)
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, FUNCTIONS[:2]):
                self.functions[node.name].append(node)
            if isinstance(node, ast.ClassDef):
                self.fields[node.name] = [
                    part.target.id for part in node.body if isinstance(part, ast.AnnAssign)
                ]
        scopes = [
            node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.Module, *FUNCTIONS))
        ]
        self.scopes = {scope: [node for node in inside(scope) if isinstance(node, SEEN)] for scope in scopes}
        known = -1
        while known != (known := self.size()):
            for scope, nodes in self.scopes.items():
                self.follow(scope, nodes)

    def size(self):
        return len(self.attributes) + sum(map(len, self.names.values()))

    def follow(self, scope, nodes):
        names = self.names[scope]
        for node in nodes:
            if isinstance(node, FUNCTIONS):
                self.names[node] |= names - set(parameters(node)) | NUMBERS
            for target, value in bindings(node):
                if self.is_number(value, names):
                    self.add(target, names)
            if isinstance(node, ast.Call):
                self.pass_on(node, names)
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if (
                        isinstance(key, ast.Constant)
                        and isinstance(key.value, str)
                        and self.is_number(value, names)
                    ):
                        self.attributes.add(key.value)

    def add(self, target, names):
        for part in ast.walk(target):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                self.attributes.add(part.attr)
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                names.add(part.id)

    def pass_on(self, call, names):
        called = last_name(call.func)
        if called == "Degrees":
            return
        for keyword in call.keywords:
            if keyword.arg and self.is_number(keyword.value, names):
                self.attributes.add(keyword.arg)
                for function in self.named(called):
                    self.names[function].add(keyword.arg)
        for place, value in enumerate(call.args):
            if self.is_number(value, names):
                for function in self.named(called):
                    taken = parameters(function)
                    taken = taken[1:] if taken[:1] in (["self"], ["cls"]) else taken
                    self.names[function] |= set(taken[place : place + 1])
                self.attributes |= set(self.fields[called][place : place + 1])

    def named(self, name):
        """Return the function of a name that only one has."""
        return self.functions[name] if len(self.functions[name]) == 1 else []

    def is_number(self, node, names):
        match node:
            case ast.Name():
                return node.id in names
            case ast.Attribute():
                return node.attr in self.attributes
            case ast.Call():
                called = last_name(node.func)
                return called in CALLED or (
                    called in ARITHMETIC and any(self.is_number(arg, names) for arg in node.args)
                )
            case ast.Subscript():
                return self.is_number(node.slice, names) or self.is_number(node.value, names)
            case ast.UnaryOp() | ast.BoolOp() | ast.IfExp() | ast.NamedExpr():
                return any(self.is_number(part, names) for part in ast.iter_child_nodes(node))
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return self.is_number(node.left, names) or self.is_number(node.right, names)
        return False

    def divisions(self):
        """Yield the expressions that divide by a number of processes."""
        for scope, nodes in self.scopes.items():
            names = self.names[scope]
            for node in nodes:
                if any(self.is_number(divisor, names) for divisor in divisors(node)):
                    yield node


def bindings(node):
    """Yield what is assigned, and its value."""
    match node:
        case ast.Assign(targets=[ast.Tuple() as target], value=ast.Tuple() as value) if len(
            target.elts
        ) == len(value.elts):
            yield from zip(target.elts, value.elts, strict=True)
        case ast.Assign():
            yield from ((target, node.value) for target in node.targets)
        case ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
            yield node.target, node.value
        case ast.For() | ast.comprehension():
            elements = getattr(node.iter, "elts", None) or [getattr(node.iter, "elt", node.iter)]
            yield from ((node.target, element) for element in elements)


def divisors(node):
    match node:
        case ast.BinOp(op=ast.Pow()):
            yield node.left
        case ast.BinOp() if isinstance(node.op, DIVISIONS):
            yield node.right
        case ast.AugAssign() if isinstance(node.op, DIVISIONS):
            yield node.value
        case ast.Slice(step=ast.expr()):
            yield node.step
        case ast.Call() if last_name(node.func) in DIVIDING:
            yield from node.args[1:2]
        case ast.Call() if last_name(node.func) in ("range", "slice", "islice"):
            yield from node.args[2:]


def found_in(source):
    return list(Numbers([ast.parse(source)]).divisions())


@pytest.mark.slow
def test_only_degrees_divide_by_the_number_of_processes():
    trees = {name_of(path): tree_of(path) for path in FILES if path != DEGREES}
    where = {node: name for name, tree in trees.items() for node in ast.walk(tree)}
    lines = [
        f"{where[node]}:{node.lineno}: {ast.unparse(node)}"
        if hasattr(node, "lineno")
        else f"{where[node]}: a slice by {ast.unparse(node.step)}"
        for node in Numbers(list(trees.values())).divisions()
    ]
    assert lines == [], "ask Degrees, which knows how many processes train samples of their own"


def test_degrees_do():
    assert (
        len(found_in(DEGREES.read_text(encoding="utf-8").replace("self.data_parallel", "self.world_size")))
        >= 3
    )


@pytest.mark.parametrize(
    "source",
    [
        "batch // plan.world_size",
        "batch % args.world_size",
        "batch /= shape.world_size",
        "batch * args.world_size ** -1",
        "divmod(batch, world_size)",
        "Fraction(batch, args.world_size)",
        "rows[rank :: args.world_size]",
        "range(rank, rows, args.world_size)",
        "world = args.world_size\nbatch // world",
        "world = number = max(1, args.world_size)\nbatch // number",
        "rank, count = args.rank, args.world_size\nbatch // count",
        "if (n := shape.world_size) > 1:\n    batch // n",
        "for n in {shape.world_size for shape in shapes}:\n    batch // n",
        "[batch // n for n in [args.world_size]]",
        "self.n = args.world_size\nbatch // self.n",
        "work = Work(gpus=shape.world_size)\nbatch // work.gpus",
        "fields = {'n': shape.world_size}\nbatch // record.n",
        "def share(batch, n):\n    return batch // n\nshare(batch, args.world_size)",
        "class A:\n    def share(self, n):\n        return 1 // n\na.share(shape.world_size)",
        "class Work:\n    gpus: int\nWork(shape.world_size)\nbatch // work.gpus",
        "share = 1 / args.world_size",
        "batch // (args.world_size or 1)",
        "batch // torch.distributed.get_world_size()",
        "n = int(getattr(args, 'n', args.world_size))\nbatch // n",
        "batch // accelerator.num_processes",
        "def outer(n=0):\n    n = args.world_size\n    def inner():\n        return batch // n",
    ],
)
def test_a_division_is_found(source):
    assert found_in(source)


def test_other_uses_are_none():
    assert not found_in(
        "price = rate * shape.world_size; args.world_size == 1; [None] * args.world_size; batch // world"
    )
    assert not found_in(
        "n = Degrees(args.world_size)\nbatch // n.data_parallel\nargs.world_size // nodes\nrows[rank::step]"
    )
