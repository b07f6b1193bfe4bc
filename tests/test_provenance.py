"""Where a number comes from: that it is ours, and that nothing is claimed that is not known."""

from __future__ import annotations

import subprocess

import pytest

from bestta import provenance


@pytest.fixture
def git(monkeypatch):
    """Git's answers, so that the tests need no git: which files it tracks, and what it describes.

    As its manual has it, ``ls-files --error-unmatch`` ends with 1 for a file that is not tracked,
    and every command ends with 128 outside a repository.
    """
    answers = {"repository": True, "tracked": {"provenance.py"}, "describe": "abc1234-dirty"}

    def run(words, *, cwd, **how):
        assert words[0] == "git"
        assert (cwd / "provenance.py").exists()
        code, out = 0, f"{answers['describe']}\n"
        if words[1] == "ls-files":
            assert words[2] == "--error-unmatch"
            code, out = (0 if words[3] in answers["tracked"] else 1), f"{words[3]}\n"
        code = code if answers["repository"] else 128
        return subprocess.CompletedProcess(words, code, out if code == 0 else "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return answers


def test_the_commit_is_that_of_the_repository_the_file_belongs_to(git):
    assert provenance.commit() == "abc1234-dirty"


def test_a_copy_installed_below_somebodys_repository_claims_no_commit(git):
    git["tracked"] = {"theirs.py"}
    assert provenance.commit() is None


def test_outside_any_repository_there_is_no_commit(git):
    git["repository"] = False
    assert provenance.commit() is None


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None
