"""The Python in README.md and docs/ runs, and so do the examples in the docstrings.

A block that cannot run everywhere says so with a comment on the line before it:
``<!-- not run: why -->``. The blocks of a page share one namespace, from top to bottom.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import ringmem

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
EXCUSE = re.compile(r"<!-- not run: .+ -->\n$")
# What a module may lack on a machine that is none the worse for it.
OPTIONAL = {"torch", "cupy", "numba", "rmm", "cuda", "jax", "matplotlib", "numba_cuda"}


def blocks(page: Path) -> list[tuple[int, str]]:
    """Line number and source of every block that is to run."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start()) + 1, match[1])
        for match in BLOCK.finditer(text)
        if not EXCUSE.search(text[: match.start()])
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if p.is_file() and blocks(p)], ids=name_of)
def test_code_of_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, source in blocks(page):
        code = compile("\n" * line + source, str(page), "exec")
        exec(code, namespace)  # the point of this test


def modules() -> list[str]:
    """Every Python module of the installed package, found without importing it."""
    package = Path(ringmem.__file__).parent
    names = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def load(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").split(".")[0] in OPTIONAL:
            pytest.skip(f"needs {error.name}")
        raise


@pytest.mark.parametrize("name", modules())
def test_examples_of_module_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RINGMEM_DEVICE", "cpu")
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, _ = doctest.testmod(module, optionflags=options, verbose=False)  # type: ignore[arg-type]
    assert failed == 0


@pytest.mark.parametrize("name", sorted(ringmem.__all__))
def test_public_name_is_documented(name: str) -> None:
    thing = getattr(ringmem, name)
    if isinstance(thing, type) or callable(thing):
        assert (thing.__doc__ or "").strip(), f"ringmem.{name} has no docstring"


def test_planted_failure_in_a_docstring_is_found() -> None:
    def wrong() -> None:
        """
        >>> 1 + 1
        3
        """

    runner = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder().find(wrong, "wrong", globs={}):
        runner.run(test, out=lambda text: None)
    assert runner.failures == 1
