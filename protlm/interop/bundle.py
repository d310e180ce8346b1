"""One Python file from the definitions that some names need, out of the modules of protlm.

The file does not need protlm. Only top-level definitions that are used, directly or through others,
are included. Docstrings are kept, comments are not.
"""

import ast
import copy
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
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
        self._module = cache(_Module)
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
            statements = self._module(module).statements
            parts += [self._renamed(one, module) for one in statements if id(one) in used]
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
        imported = here.imports.get(found.name)
        if imported and imported[0].module.partition(".")[0] == _PACKAGE:
            return self.find(*imported[0])
        return None

    def _renamed(self, statement: ast.stmt, module: str) -> str:
        """Returns a statement of a module with the names of the file.

        A parameter whose name has to change is refused: callers use it.
        """

        def new(name: str) -> str:
            found = self.find(module, name)
            return self.final_names.get(found, name) if found else name

        statement = copy.deepcopy(statement)
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            statement.name = new(statement.name)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                node.id = new(node.id)
            elif isinstance(node, ast.arg):
                assert new(node.arg) == node.arg, f"{module}: {node.arg} has two meanings"
        return ast.unparse(statement)

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
                origin, text = here.imports[node.id]
                assert origin.module.partition(".")[0] != _PACKAGE, (
                    f"{name}: import names of {origin}"
                )
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
