"""Finder of assignments to names of other libraries, in the source of a file."""

import ast
from collections.abc import Collection, Iterator

OWN = {"flytune", "training_estimates", "tasks", "workflows", "images"}
# Functions that set an attribute or an item, and those of mappings and lists that change them.
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__", "__setitem__"}
CHANGES = {"update", "setdefault", "pop", "popitem", "clear", "append", "insert", "extend", "remove"}
# Environment variables are inputs of the libraries.
INPUTS = {"os.environ"}
DYNAMIC = {"sys.modules", "import_module", "__import__", "importlib.reload"}


def makers(tree: ast.Module) -> set[str]:
    """Return the names of the functions of a file that return a function which they define."""
    return {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _returns_function(node)
    }


def _returns_function(outer: ast.FunctionDef) -> bool:
    parts = list(ast.walk(outer))
    returned = [item.value for item in parts if isinstance(item, ast.Return)]
    inner = {item.name for item in parts if isinstance(item, ast.FunctionDef) and item is not outer}
    return any(
        isinstance(one, ast.Lambda) or (isinstance(one, ast.Name) and one.id in inner) for one in returned
    )


def found(tree: ast.Module, others: Collection[str] = ()) -> list[tuple[int, str]]:
    """Return the lines and targets of assignments to attributes of other libraries' modules and classes, or
    of their methods.

    Found are: plain, augmented and deleting statements, loops and `with` that bind; setattr and its kind;
    vars(), __dict__ and mappings of a module; sys.modules; unittest.mock and monkeypatch; methods that are
    replaced on an object; its __class__. Names are followed through aliases within the file, and not from one
    function to another as arguments: an attribute of an argument is found where its value is a function.

    Args:
        others: functions of other files that return functions.
    """
    return sorted(set(_Finder(tree, makers(tree) | set(others)).hits()))


class _Finder:
    def __init__(self, tree: ast.Module, makers: set[str]) -> None:
        self.nodes, self.makers = list(ast.walk(tree)), makers
        self.foreign: set[str] = set()
        self.functions: set[str] = set()
        """Names of functions, and of names that functions were assigned to."""
        self._read_imports()
        self._read_functions()
        before = -1
        while before != len(self.foreign):
            before = len(self.foreign)
            self._read_aliases()

    def _read_imports(self) -> None:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names = {
                    alias.asname or alias.name.partition(".")[0]
                    for alias in node.names
                    if _top(alias.name) not in OWN
                }
                self.foreign |= names
            elif isinstance(node, ast.ImportFrom) and _top(node.module or "") not in OWN:
                self.foreign |= {alias.asname or alias.name for alias in node.names}

    def _read_functions(self) -> None:
        methods = {id(item) for node in self.nodes if isinstance(node, ast.ClassDef) for item in node.body}
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if id(node) not in methods:
                    self.functions.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                self.functions |= {target.id for target in node.targets if isinstance(target, ast.Name)}

    def _read_aliases(self) -> None:
        """Note names that stand for something of a library: modules, classes and mappings, but no results of
        calls."""
        for node in self.nodes:
            pairs: list[tuple[ast.expr, ast.expr]] = []
            if isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                pairs = [(node.target, node.value)]
            elif isinstance(node, ast.For | ast.comprehension):
                values = node.iter.elts if isinstance(node.iter, ast.Tuple | ast.List | ast.Set) else []
                pairs = [(node.target, value) for value in values]
            for target, value in pairs:
                self._alias(target, value)

    def _alias(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                for one, other in zip(target.elts, value.elts, strict=True):
                    self._alias(one, other)
        elif isinstance(target, ast.Name) and self._is_foreign(value, alias=True):
            self.foreign.add(target.id)

    def _is_foreign(self, node: ast.expr, alias: bool = False) -> bool:
        """Return whether an expression is a library's module, class or mapping, or an attribute of one."""
        text = ast.unparse(node)
        if text in INPUTS:
            return False
        if any(f"{name}[" in text or f"{name}.get(" in text or f"{name}(" in text for name in DYNAMIC):
            return True
        if isinstance(node, ast.Name):
            return node.id in self.foreign
        if isinstance(node, ast.Attribute):
            return self._is_foreign(node.value, alias)
        if isinstance(node, ast.IfExp):
            return self._is_foreign(node.body, alias) or self._is_foreign(node.orelse, alias)
        if isinstance(node, ast.NamedExpr):
            return self._is_foreign(node.value, alias)
        if isinstance(node, ast.Subscript):
            return not alias and self._is_foreign(node.value)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("type", "vars") and node.args:  # the class of an object, or a module's attributes
                return name == "type" or self._is_foreign(node.args[0])
            return name == "getattr" and bool(node.args) and self._is_foreign(node.args[0])
        return False

    def hits(self) -> Iterator[tuple[int, str]]:
        for node in self.nodes:
            for target, value in _bindings(node):
                if self._is_hit(target, value):
                    yield target.lineno, ast.unparse(target)
            if isinstance(node, ast.Call) and self._changes(node):
                yield node.lineno, ast.unparse(node)[:80]

    def _is_hit(self, target: ast.expr, value: ast.expr | None) -> bool:
        if ast.unparse(target) in INPUTS:
            return False
        if isinstance(target, ast.Subscript):
            return self._is_foreign(target.value) or _is_namespace(target.value)
        if not isinstance(target, ast.Attribute) or ast.unparse(target.value) in ("self", "cls"):
            return False
        if target.attr in ("__class__", "__code__", "__bases__"):
            return True
        return self._is_foreign(target.value) or (value is not None and self._is_function(value, target))

    def _is_function(self, value: ast.expr, target: ast.expr | None) -> bool:
        """Return whether a value is a function: a lambda, one of the file, or what wraps the target's own."""
        if isinstance(value, ast.Lambda):
            return True
        if isinstance(value, ast.Name):
            return value.id in self.functions
        if isinstance(value, ast.IfExp):
            return self._is_function(value.body, target) or self._is_function(value.orelse, target)
        if not isinstance(value, ast.Call):
            return False
        name = ast.unparse(value.func).rpartition(".")[2]
        wrapped = [*value.args, *(keyword.value for keyword in value.keywords)]
        return (
            name
            in {
                "partial",
                "partialmethod",
                "MethodType",
                "FunctionType",
                "wraps",
                "update_wrapper",
                *self.makers,
            }
            or (
                target is not None
                and self._is_foreign(value.func)
                and any(ast.unparse(one) == ast.unparse(target) for one in wrapped)
            )
            or (isinstance(value.func, ast.Call) and self._is_function(value.func, target))
        )

    def _changes(self, call: ast.Call) -> bool:
        name = ast.unparse(call.func)
        last = name.rpartition(".")[2]
        if last in SETTERS:
            # object.__setattr__(x, ...) and setattr(x, ...) name x first; x.__setattr__(...) before the
            # point.
            owners = [*call.args[:1], *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
            value = call.args[-1] if call.args else None
            return any(
                self._is_foreign(one) and ast.unparse(one) not in ("object", "type", "super()")
                for one in owners
            ) or (value is not None and last in ("setattr", "__setattr__") and self._is_function(value, None))
        if last in CHANGES and isinstance(call.func, ast.Attribute):
            return self._is_foreign(call.func.value) or _is_namespace(call.func.value)
        return (
            "monkeypatch" in name
            or last == "patch"
            or any(f"patch.{kind}" in name for kind in ("object", "dict", "multiple"))
        )


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_namespace(node: ast.expr) -> bool:
    """Return whether an expression is the attributes of an object other than the method's own: __dict__,
    vars()."""
    text = ast.unparse(node)
    return (text.endswith(".__dict__") and text != "self.__dict__") or (
        text.startswith("vars(") and text != "vars(self)"
    )


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield the single targets that a statement binds or deletes, with their values where it tells them."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target, node.value
    elif isinstance(node, ast.Delete):
        for target in node.targets:
            yield from _pairs(target, None)
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield from _pairs(node.target, None)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _pairs(node.optional_vars, None)


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(target, ast.Starred):
        yield from _pairs(target.value, None)
    elif isinstance(target, ast.Tuple | ast.List):
        values = (
            value.elts
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            else []
        )
        for index, one in enumerate(target.elts):
            yield from _pairs(one, values[index] if values else None)
    else:
        yield target, value
