"""The package itself: what it imports, which way its arrows point, and that its examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import runpy
import sys
from pathlib import Path

import pytest

import bestta
from bestta.adapters.registry import _methods
from nets import Segmenter, randomise, stream

PACKAGE = Path(bestta.__file__).parent
ROOT = PACKAGE.parent.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder(path: Path) -> str:
    """The folder of the package that ``path`` lies in, "" for the package itself."""
    return path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""


def test_each_folder_imports_only_what_its_extra_installs():
    core = {"torch", "numpy", "safetensors", "bestta", *sys.stdlib_module_names}
    pictures = {"cv2", "PIL"}
    more = {
        "data": pictures,
        "protocols": pictures,
        "training": pictures,
        "benchmark": pictures | {"yaml", "ray"},
        "reports": pictures,
        "cli": {"typer", "rich", *pictures},
    }
    for path in SOURCES:
        used = {i.split(".")[0] for i in imports(path)}
        assert used <= core | more.get(folder(path), set()), path


def test_importing_bestta_imports_the_method_and_no_more():
    import subprocess

    folders = sorted(p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists())
    method = ("adapters", "calibration", "lean")
    heavy = (*(f"bestta.{name}" for name in folders if name not in method), "cv2", "PIL")
    code = f"import bestta, sys; print([m for m in sys.modules if m.startswith({heavy})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_arrows_point_one_way():
    """The paper's files know no adapter, adapters no model and no data, data no protocol."""
    paper = {"bein", "losses", "moments", "profile", "insertion", "guard"}
    paper |= {"files", "outputs", "progress", "provenance", "interrupt"}
    sources = {"models", "data", "protocols", "metrics"}
    long_work = {"files", "interrupt", "progress", "provenance"}
    allowed = {
        "lean": {"lean", "insertion", "losses"},
        "adapters": paper | {"_version", "adapters", "lean"},
        "calibration": paper | {"_version", "adapters", "calibration", "data", "reports"},
        "models": {"models", "files", "profile"},
        "data": {"data", "progress"},
        "protocols": {"protocols", "data", "interrupt"},
        "metrics": {"metrics"},
        "training": sources | long_work | {"training", "profile"},
        "benchmark": sources | long_work | paper | {"adapters", "training", "benchmark"},
        "reports": {"reports", "data"},
    }
    for path in SOURCES:
        used = {i.split(".")[1] for i in imports(path) if i.startswith("bestta.")}
        if path.parent == PACKAGE and path.stem in paper:
            assert used <= paper | {"_version"}, path
        elif folder(path) in allowed:
            assert used <= allowed[folder(path)], path


def test_every_folder_has_its_arrows():
    """A folder that is named in none of the two lists would be free to import anything."""
    text = Path(__file__).read_text()
    for path in PACKAGE.iterdir():
        if (path / "__init__.py").exists() and path.name != "cli":
            assert f'"{path.name}": ' in text, path.name


def test_public_names_are_those_of_the_design():
    assert set(bestta.__all__) == {
        "BeIN", "SourceProfile", "__version__", "adapt", "bein", "calibrate", "layers", "methods",
        "prepare",
    }  # fmt: skip
    assert all(hasattr(bestta, name) for name in bestta.__all__)


@pytest.mark.parametrize("name", [module_name(p) for p in SOURCES])
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.failed == 0


def test_the_method_in_contributing_works_as_written(tmp_path, monkeypatch):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "shift_of_contributing.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("shift_of_contributing")
        model = randomise(Segmenter(), seed=1)
        images = stream(4, seed=2)
        adapter = bestta.adapt(model, method="shift", decay=0.5)
        adapter(images[0])
        state = adapter.state()
        expected = adapter(images[1])
        adapter.load_state(state)
        assert expected.equal(adapter(images[1]))
        assert not expected.equal(model(images[1]))
        adapter(images[2] * 1e37)
        assert all(bool(v.isfinite().all()) for v in adapter.state().values())
    finally:
        _methods.pop("shift", None)


@pytest.mark.guarded
@pytest.mark.usual
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
