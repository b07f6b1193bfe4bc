"""Where a number comes from: that it is ours, and that nothing is claimed that is not known."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bestta import provenance

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def repository(folder: Path) -> str:
    """Make ``folder`` a repository with one commit of all it holds; the commit."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(folder)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    described = subprocess.run([*git, "describe", "--always"], capture_output=True, text=True)
    return described.stdout.strip()


def placed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the module in ``folder``, which it believes to be its own."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "provenance.py"
    shutil.copy(provenance.__file__, copy)
    monkeypatch.setattr(provenance, "__file__", str(copy))
    return copy


@needs_git
def test_the_commit_is_that_of_the_repository_the_file_belongs_to(tmp_path, monkeypatch):
    copy = placed(tmp_path, monkeypatch)
    commit = repository(tmp_path)
    assert provenance.commit() == commit
    copy.write_text(copy.read_text() + "# changed")
    assert provenance.commit() == f"{commit}-dirty"


@needs_git
def test_a_copy_installed_below_somebodys_repository_claims_no_commit(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text("")
    repository(tmp_path)
    placed(tmp_path / ".venv" / "bestta", monkeypatch)
    assert provenance.commit() is None


def test_without_git_or_repository_there_is_no_commit(tmp_path, monkeypatch):
    placed(tmp_path, monkeypatch)
    assert provenance.commit() is None
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None
