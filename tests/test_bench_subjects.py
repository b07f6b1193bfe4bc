"""Models of one's own in the benchmark: a Python file, and what is made of it."""

from __future__ import annotations

import pytest

from bench import SIZE, played, protocol, run_of
from bestta.benchmark import Subject
from bestta.benchmark.parts import identity
from bestta.benchmark.streams import describe, stream_of
from bestta.benchmark.subjects import card_of, import_file, subject_of
from bestta.data.classes import CLASSES

FILE = """
import torch
import bestta
from bestta.benchmark import Subject
from bestta.data import Streets
from bestta.data.classes import CLASSES
from bestta.data.tensors import LabelledBatches

def subject():
    torch.manual_seed({seed})
    model = bestta.models.load("streets")
    if {seed}:
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
    return Subject(
        name="mine", model=model, classes=CLASSES, size=(64, 32), {more}
    )
"""

PROFILE = 'profile=bestta.models.load_profile("streets"),'
TRAIN = "train=lambda: LabelledBatches(Streets(4, size=(64, 32)), 2),"


@pytest.fixture
def file(tmp_path):
    def write(more: str = "", seed: int = 0, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(FILE.format(more=more, seed=seed))
        return str(path)

    return write


def test_the_model_of_a_file_scores_as_the_same_model_that_ships(file, tmp_path):
    own = played(run_of("bestta", model=file(PROFILE)), tmp_path / "own")
    shipped = played(run_of("bestta"), tmp_path / "shipped")
    assert own["blocks"] == shipped["blocks"]
    assert own["traces"] == shipped["traces"]
    assert (own["stream"]["model"], shipped["stream"]["model"]) == ("mine", "streets")


def test_other_weights_are_another_stream_whatever_the_file_is_called(file):
    first, second = file(), file(seed=1, name="other.py")
    keys = [describe(run, stream_of(run))["key"] for run in map(_run, (first, second))]
    assert keys[0] != keys[1]


def test_where_the_file_lies_does_not_matter(file, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    runs = [_run(file()), _run(file(name="elsewhere/mine.py"))]
    names = [identity(run, stream_of(run)) for run in runs]
    assert names[0] == names[1]
    assert str(tmp_path) not in str(runs[0].resolved())


def test_what_a_method_learns_from_the_source_comes_from_the_file(file, tmp_path):
    record = played(run_of("eata", model=file(TRAIN)), tmp_path)
    assert record["method"] == "eata"
    with pytest.raises(ValueError, match="train=lambda"):
        played(run_of("eata", model=file(name="without.py")), tmp_path / "new")


def test_a_method_that_needs_a_profile_says_so_if_the_file_has_none(file, tmp_path):
    with pytest.raises(ValueError, match="needs a source profile"):
        played(run_of("bestta", model=file()), tmp_path)
    assert played(run_of("tent", model=file()), tmp_path)["score"] > 0


def test_features_are_not_looked_at_without_a_profile(file, tmp_path):
    with pytest.raises(ValueError, match="no source profile"):
        played(run_of("source", model=file(), similarities=True), tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"has no function subject\(\)"),
        ("subject = 3", r"has no function subject\(\)"),
        ("def subject(): return 3", "returned int, not a bestta.benchmark.Subject"),
    ],
)
def test_a_file_without_a_subject_is_refused(text, words, tmp_path):
    path = tmp_path / "none.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        subject_of(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Python file"):
        protocol(model=str(tmp_path / "absent.py"))
    with pytest.raises(ValueError, match="no file"):
        import_file(str(tmp_path / "absent.py"))


def test_a_file_that_fails_can_be_mended_and_imported_again(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    with pytest.raises(ValueError, match=r"broken.py, line 1 cannot be imported: ZeroDivision"):
        import_file(str(path))
    path.write_text("value = 7")
    assert import_file(str(path)).value == 7


def test_the_card_of_a_file_tells_what_its_subject_says(file):
    path = file()
    card, subject = card_of(path), subject_of(path)
    assert isinstance(subject, Subject)
    assert (card.name, card.task, card.metric) == ("mine", "segmentation", "mIoU")
    assert (card.classes, card.size) == (CLASSES, SIZE)
    assert card.parameters == sum(p.numel() for p in subject.model.parameters())


def _run(model: str):
    return run_of("source", model=model)
