"""The sources of one SGLang release: fetched as a wheel, read as text and syntax trees, never imported."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SRT = "sglang/srt/"
# pip is asked for the wheel of one platform, whatever this machine's is: only its text is read.
WHEEL_OF = [
    "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none",
    "--platform", "manylinux_2_34_x86_64", "--platform", "any", "--only-binary", ":all:", "--no-deps",
]  # fmt: skip


@dataclass
class Release:
    """`root` holds sglang/srt/...; paths are below that. Whatever is not there reads as the empty text."""

    version: str
    root: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    def files(self, pattern: str) -> list[str]:
        base = self.root / SRT
        return sorted(p.relative_to(base).as_posix() for p in base.glob(pattern))

    def tree(self, path: str) -> ast.Module | None:
        if path not in self._trees:
            file = self.root / SRT / path
            self._trees[path] = ast.parse(file.read_text()) if file.is_file() else None
        return self._trees[path]

    def source(self, path: str, name: str = "") -> str:
        """A file, or a class, method or function in it ("Class.method"), in Python's own spelling of it."""
        node: ast.AST | None = self.tree(path)
        for part in name.split(".") if name else ():
            node = node and _named(node, part)
        return "" if node is None else ast.unparse(node)

    def defines(self, path: str, name: str) -> bool:
        """Whether the top level of a module defines or imports this name."""
        tree = self.tree(path)
        if tree is None:
            return False
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
                return True
            if isinstance(node, ast.Assign) and any(ast.unparse(t) == name for t in node.targets):
                return True
            if isinstance(node, (ast.Import, ast.ImportFrom)) and name in (
                a.asname or a.name for a in node.names
            ):
                return True
        return False


def _named(node: ast.AST, name: str) -> ast.AST | None:
    """The class or function of this name: directly inside if there is one, else wherever it is."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    inside = [n for n in ast.iter_child_nodes(node) if isinstance(n, kinds) and n.name == name]
    deeper = (n for n in ast.walk(node) if isinstance(n, kinds) and n.name == name)
    return inside[0] if inside else next(deeper, None)


def fetch(version: str, cache: Path, needed: Callable[[str, bytes], bool], key: str = "") -> Release:
    """The release from the cache, else by pip; only the needed files of the wheel are kept.

    needed: (path below sglang/srt, content) -> whether to keep it. key: stands for what is needed; under
    another one the wheel is fetched anew. Raises OSError if pip finds no wheel.
    """
    root = cache / version
    if not (root / "complete").is_file() or (root / "complete").read_text() != key:
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-qq",
                "--disable-pip-version-check",
                *WHEEL_OF,
            ]
            done = subprocess.run(
                [*command, "-d", folder, f"sglang=={version}"], capture_output=True, text=True
            )
            wheels = list(Path(folder).glob("sglang-*.whl"))
            if not wheels:
                raise OSError(f"sglang {version}: no wheel: {done.stderr.strip()[-300:]}")
            keep(wheels[0], root, needed, key)
    return Release(version, root)


def keep(wheel: Path, root: Path, needed: Callable[[str, bytes], bool], key: str = "") -> None:
    """Unpack the needed files of a wheel into `root`, and mark it complete."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            path = info.filename.removeprefix(SRT)
            if path == info.filename or not path.endswith(".py") or ".." in path.split("/"):
                continue
            content = archive.read(info)
            if needed(path, content):
                target = root / SRT / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
    (root / "complete").write_text(key)
