"""One Python file from the definitions that some names need, out of the modules of protlm.

The file does not need protlm. Only top-level definitions that are used, directly or through others,
are included. Docstrings are kept, comments are not.
"""

import ast
import copy
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

_PACKAGE = "protlm"


class Name(NamedTuple):
    """A top-level name of a module."""

    module: str
    name: str


class _Module:
    """The top-level statements of a module."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, f"{name} is not a module"
        self.name = name
        self.statements = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        return {name: one for one in self.statements for name in _defined_by(one)}

    @cached_property
    def imports(self) -> dict[str, tuple[Name, str]]:
        """The origin and the statement of each imported name."""
        found = {}
        for statement in self.statements:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                parent = statement.module or "" if isinstance(statement, ast.ImportFrom) else ""
                for alias in statement.names:
                    origin = Name(parent, alias.name) if parent else Name(alias.name, "")
                    single = ast.ImportFrom(parent, [alias], 0) if parent else ast.Import([alias])
                    found[alias.asname or alias.name] = (origin, ast.unparse(single))
        return found


def _defined_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


class Bundle:
    """The definitions that some names need; `replaced` gives those used in place of others."""

    def __init__(self, roots: Iterable[Name], replaced: Mapping[Name, Name]) -> None:
        self._replaced = replaced
        self._modules: dict[str, _Module] = {}
        # In an order in which every module follows those that it imports.
        self._order: list[str] = []
        self._placed: set[str] = set()
        self._used: dict[Name, ast.stmt] = {}
        self._outside: dict[str, str] = {}
        for root in roots:
            self._add(root)

    def source(self) -> str:
        """Returns the text of the file, without a docstring."""
        parts = ["\n".join(sorted(self._outside.values()))]
        for module in self._order:
            used = {id(one) for name, one in self._used.items() if name.module == module}
            renaming = _Renaming(self, module)
            for statement in self._module(module).statements:
                if id(statement) in used:
                    parts.append(ast.unparse(renaming.renamed(statement)))
        return "\n\n\n".join(parts) + "\n"

    @cached_property
    def final_names(self) -> dict[Name, str]:
        """The names in the file: two modules may have different objects of one name."""
        final: dict[Name, str] = {}
        taken = set(self._outside)
        for name in sorted(self._used, key=lambda used: self._order.index(used.module)):
            new = name.name
            while new in taken:
                new = f"{new}_{name.module.rpartition('.')[2].strip('_')}"
            taken.add(new)
            final[name] = new
        return final

    def find(self, module: str, name: str) -> Name | None:
        """Returns the place in protlm where a top-level name of a module was defined, or None."""
        asked = Name(module, name)
        found = self._replaced.get(asked, asked)
        here = self._module(found.module)
        if found.name in here.definitions:
            return found
        if found.name not in here.imports:
            return None
        origin, _ = here.imports[found.name]
        if origin.module.partition(".")[0] != _PACKAGE:
            return None
        defined = self.find(*origin)
        assert defined is not None, f"{module}: import the names of {origin}, not a module"
        return defined

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            self._modules[name] = _Module(name)
        return self._modules[name]

    def _add(self, name: Name) -> None:
        if name in self._used:
            return
        here = self._module(name.module)
        statement = self._used[name] = here.definitions[name.name]
        self._place(name.module)
        for node in ast.walk(statement):
            assert not isinstance(node, ast.Import | ast.ImportFrom), f"{name}: move the import up"
            if not isinstance(node, ast.Name):
                continue
            if found := self.find(name.module, node.id):
                self._add(found)
            elif node.id in here.imports:
                _, text = here.imports[node.id]
                assert self._outside.setdefault(node.id, text) == text, f"two of {node.id}"

    def _place(self, module: str) -> None:
        """Gives a module its place in the file, after the modules that it imports."""
        if module in self._placed:
            return
        self._placed.add(module)
        for name in self._module(module).imports:
            if origin := self.find(module, name):
                self._place(origin.module)
        self._order.append(module)


class _Renaming(ast.NodeTransformer):
    """Puts the names of the file into the statements of a module."""

    def __init__(self, bundle: Bundle, module: str) -> None:
        self._bundle, self._module = bundle, module

    def renamed(self, statement: ast.stmt) -> ast.AST:
        statement = copy.deepcopy(statement)
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            statement.name = self._new(statement.name)
        return self.generic_visit(statement)

    def _new(self, name: str) -> str:
        found = self._bundle.find(self._module, name)
        return self._bundle.final_names.get(found, name) if found else name

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._new(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Refuses a parameter whose name has to change: callers use it."""
        assert self._new(node.arg) == node.arg, f"{self._module}: {node.arg} has two meanings"
        return self.generic_visit(node)
