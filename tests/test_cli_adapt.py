"""``bestta adapt``: what it makes of a folder of photos, and how it is stopped and goes on."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import bestta
from bestta.cli import adapt as cli_adapt
from bestta.cli.adapt import class_ids, model_size
from bestta.data import Streets
from bestta.data.tensors import to_tensor
from bestta.data.weather import simulate
from bestta.files import load_tensors

SCENES = [simulate(sample.image, "fog", 3, seed=7) for sample in Streets(5, split="val")]
"""Of the size that the model was trained on, 256×128: nothing is resized on the way to it."""


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def save(image, path: str | bytes) -> None:
    Path(os.fsdecode(path)).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(os.fsdecode(path))


@pytest.fixture
def photos() -> list[str]:
    """Five photos in a folder, the names of which are in order by value and not by letter."""
    names = ["1.png", "2.png", "10.png", "more/3.png", "more/20.png"]
    for name, scene in zip(names, SCENES, strict=True):
        save(scene, f"photos/{name}")
    return names


WORDS = ("adapt", "--images", "photos", "--model", "streets")

QUICK = (*WORDS, "--size", "64x32")
"""Where it does not matter what the model sees."""


def record(out: str = "adapted") -> dict:
    return json.loads(Path(out, "adapted.json").read_text())


def ids(path: str | Path) -> np.ndarray:
    with Image.open(path) as picture:
        assert picture.mode == "L"
        return np.asarray(picture)


def size_of(path: str) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def by_hand(images) -> tuple[list[np.ndarray], list[np.ndarray], bestta.adapters.base.Adapter]:
    """Class ids of the plain and of the adapted model, by the library, image after image."""
    model = bestta.models.load("streets")
    adapter = bestta.adapt(model, bestta.models.load_profile("streets"))
    alone, adapted = [], []
    for image in images:
        tensor = to_tensor(image)
        with torch.no_grad():
            alone.append(model(tensor)[0].argmax(0).numpy())
        adapted.append(adapter(tensor)[0].argmax(0).numpy())
    return alone, adapted, adapter


# --- what it makes ----------------------------------------------------------------------------


def test_predictions_are_those_of_the_library_on_the_photos_in_natural_order(run, photos):
    done = run(*WORDS)
    assert done.returncode == 0, done.stderr
    alone, adapted, adapter = by_hand(SCENES)
    found = record()
    assert [entry["name"] for entry in found["photos"]] == photos
    for name, plain, expected, entry in zip(photos, alone, adapted, found["photos"], strict=True):
        assert np.array_equal(ids(f"adapted/predictions/{name}"), expected)
        assert entry["changed_percent"] == pytest.approx(100 * np.mean(plain != expected))
        road = found["classes"].index("road")
        for which, seen in (("alone", plain), ("adapted", expected)):
            share = entry["shares_percent"][which]
            assert share["road"] == pytest.approx(100 * np.mean(seen == road))
            assert sum(share.values()) == pytest.approx(100)
        assert (entry["size"], entry["model_size"]) == ([256, 128], [256, 128])
    assert any(entry["changed_percent"] > 0 for entry in found["photos"])
    state, _ = load_tensors("adapted/state.safetensors", "adapter state")
    for name, tensor in adapter.state().items():
        assert torch.equal(state[name], tensor), name


def test_the_record_says_what_each_step_said_and_what_made_it(run, photos):
    run(*WORDS)
    found = record()
    _, _, adapter = by_hand(SCENES)
    last = found["photos"][-1]
    assert last["last"]["images_seen"] == 5
    assert last["last"]["adapted"] is True
    assert last["last"]["losses"] == pytest.approx(dict(adapter.last.losses))
    assert all(entry["time_ms"] > 0 for entry in found["photos"])
    assert found["settings"] == adapter.settings
    assert (found["method"], found["model"]["name"]) == ("bestta", "streets")
    assert found["provenance"]["bestta"] == bestta.__version__
    assert found["skipped"] == []


def test_entropy_is_that_of_both_models(run, photos):
    run(*WORDS, "--count", 1)
    model = bestta.models.load("streets")
    adapter = bestta.adapt(model, bestta.models.load_profile("streets"))
    image = to_tensor(SCENES[0])
    (entry,) = record()["photos"]
    for which, logits in (("alone", model(image).detach()), ("adapted", adapter(image))):
        # By definition, −Σ p log p, from torch's own distribution.
        expected = torch.distributions.Categorical(logits=logits.movedim(1, -1)).entropy().mean()
        assert entry["entropy"][which] == pytest.approx(float(expected), rel=1e-4)


def test_an_overlay_lies_half_way_between_the_photo_and_the_colours_of_its_classes(run, photos):
    run(*WORDS, "--count", 1)
    overlay = np.asarray(Image.open("adapted/overlays/1.jpg")).astype(float)
    palette = np.array(bestta.data.classes.PALETTE)
    (alone,), (adapted,), _ = by_hand(SCENES[:1])
    off, off_alone = (
        np.abs(overlay - (SCENES[0] + palette[seen]) / 2).mean(2) for seen in (adapted, alone)
    )
    # JPEG is not exact, least of all where colours meet.
    assert np.median(off) < 3
    differs = alone != adapted
    assert (off < off_alone)[differs].mean() > 0.8, "it shows the adapted model"


def test_three_pictures_stand_side_by_side_to_compare(run, photos):
    run(*WORDS, "--count", 1)
    sheet = np.asarray(Image.open("adapted/compare/1.jpg")).astype(float)
    scene = np.asarray(Image.fromarray(SCENES[0]).resize((512, 256), Image.Resampling.NEAREST))
    # Gaps of 4 pixels round pictures of 512×256, the caption beneath.
    first, second, third = (sheet[4:260, x : x + 512] for x in (4, 520, 1036))
    assert np.median(np.abs(first - scene)) < 3
    assert np.abs(first - second).mean() > 10
    changed = record()["photos"][0]["changed_percent"]
    assert 0 < changed < 100
    differs = np.abs(second - third).max(2) > 40
    assert 100 * differs.mean() == pytest.approx(changed, rel=0.5)
    assert sheet.shape[1] == 1036 + 512 + 4
    assert list(reversed(sheet.shape[:2])) == record()["photos"][0]["compare_size"]


def test_captions_name_the_three_pictures_and_not_the_file(run, photos, monkeypatch):
    captions = []
    grid = cli_adapt.grid

    def watched(*arguments, **options):
        captions.append(options["captions"])
        return grid(*arguments, **options)

    monkeypatch.setattr(cli_adapt, "grid", watched)
    run(*QUICK, "--count", 1)
    assert captions == [[["photo", "left alone", "adapted"]]]
    # White between the captions, which lie beneath pictures of 512×256 with gaps of 4 pixels.
    foot = np.asarray(Image.open("adapted/compare/1.jpg").convert("L"))[268:]
    for x in (4, 520, 1036):
        assert foot[:, x : x + 256].min() < 100, "there is a caption"
        assert foot[:, x + 256 : x + 512].min() > 240, "it keeps to its half"


@pytest.mark.parametrize(
    ("name", "picture", "size"),
    [
        ("grey.png", lambda i: Image.fromarray(i).convert("L"), (256, 128)),
        ("rgba.png", lambda i: Image.fromarray(i).convert("RGBA"), (256, 128)),
        ("large.jpg", lambda i: Image.fromarray(i).resize((900, 700)), (900, 700)),
        ("one.png", lambda i: Image.fromarray(i[:1, :1]), (1, 1)),
        ("tall.png", lambda i: Image.fromarray(i[:, :3].repeat(20, 0)), (3, 2560)),
        ("wide.bmp", lambda i: Image.fromarray(i[:2].repeat(10, 1)), (2560, 2)),
    ],
)
def test_photos_of_any_shape_get_predictions_of_their_own_size(run, name, picture, size):
    Path("photos").mkdir()
    picture(SCENES[0]).save(Path("photos", name))
    done = run(*WORDS)
    assert done.returncode == 0, done.stderr
    stem = Path(name).stem
    assert size_of(f"adapted/predictions/{stem}.png") == size
    assert size_of(f"adapted/overlays/{stem}.jpg") == size
    width, height = size_of(f"adapted/compare/{stem}.jpg")
    assert width <= 1600
    assert height <= 1100


def test_a_photo_that_was_taken_upright_is_shown_upright(run):
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(SCENES[0])))
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    Path("photos").mkdir()
    turned.save("photos/turned.jpg", exif=exif)
    run(*WORDS)
    assert size_of("adapted/overlays/turned.jpg") == (256, 128)


def test_a_size_of_ones_own_is_what_the_model_sees(run, photos):
    done = run(*WORDS, "--count", 1, "--size", "96x64")
    assert done.returncode == 0, done.stderr
    (entry,) = record()["photos"]
    assert (entry["size"], entry["model_size"]) == ([256, 128], [96, 64])
    assert ids("adapted/predictions/1.png").shape == (128, 256)


def test_method_and_settings_are_those_asked_for(run, photos):
    done = run(*QUICK, "--count", 2, "--method", "tent", "--set", "lr=0.25")
    assert done.returncode == 0, done.stderr
    found = record()
    assert (found["method"], found["settings"]["lr"]) == ("tent", 0.25)
    assert "entropy" in found["photos"][0]["last"]["losses"]


def test_a_method_that_never_learns_changes_no_pixel_and_says_so(run, photos):
    done = run(*QUICK, "--count", 2, "--method", "source")
    assert "2 photos in adapted: 0.0 % of the pixels changed class; 2 not learned" in done.stdout
    assert [entry["changed_percent"] for entry in record()["photos"]] == [0, 0]
    assert "the source model does not adapt" in Path("adapted/index.html").read_text()


def test_bf16_is_near_fp32_and_not_the_same(run, photos):
    run(*QUICK, "--count", 1, "--out", "single")
    run(*QUICK, "--count", 1, "--out", "half", "--precision", "bf16")
    assert record("half")["precision"] == "bf16"
    single, half = (record(out)["photos"][0]["entropy"]["alone"] for out in ("single", "half"))
    assert half != single
    assert half == pytest.approx(single, rel=0.1)


def test_it_ends_with_what_to_look_at_and_the_terms_of_the_model(run, photos):
    done = run(*QUICK)
    assert "Next: open adapted/index.html in a browser." in done.stdout
    assert done.stdout.count(bestta.models.card("streets").terms) == 1


# --- the page ---------------------------------------------------------------------------------


class Page(HTMLParser):
    """Everything a page asks for, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        if tag == "img":
            self.images.append(found)
        self.links += [found[name] for name in ("src", "href") if name in found]

    def handle_data(self, data):
        self.words += data


ODD = "a #1 \"ü\" 'q' <b>&amp; 100%?"


def test_every_link_of_the_page_leads_to_a_file_beside_it_whatever_its_name(run):
    names = [f"{ODD}.png", "x/plain.png"]
    for name in names:
        save(SCENES[0], f"photos/{name}")
    run(*QUICK)
    page = Page(Path("adapted/index.html").read_text(encoding="utf-8"))
    links = [link for link in page.links if link != "data:,"]
    for link in links:
        assert Path("adapted", unquote(link)).is_file(), link
    # compare twice (picture and link), overlay and class ids, of both; and the record.
    assert len(links) == 2 * 4 + 1
    for name in names:
        assert name in page.words
    assert "b" not in page.tags[page.tags.index("article") + 1 :][:2], "the name is no markup"


def test_only_pictures_far_down_the_page_wait_until_one_scrolls_to_them(run, photos, monkeypatch):
    run(*QUICK)
    page = Page(Path("adapted/index.html").read_text())
    assert len(page.images) == 5
    assert not any("loading" in image or "decoding" in image for image in page.images)
    monkeypatch.setattr(cli_adapt, "AT_LOAD", 3)
    run(*QUICK)
    page = Page(Path("adapted/index.html").read_text())
    assert [image.get("loading") for image in page.images] == [None] * 3 + ["lazy"] * 2


def test_the_page_tells_for_each_photo_how_much_changed_and_names_every_class(run, photos):
    run(*QUICK)
    page = Page(Path("adapted/index.html").read_text(encoding="utf-8"))
    found = record()
    for entry in found["photos"]:
        assert f"{entry['changed_percent']:.1f} % of the pixels changed class" in page.words
        for name, share in entry["shares_percent"]["adapted"].items():
            assert f"{name}" in page.words
            assert f"{share:.1f} %" in page.words
    for name in found["classes"]:
        assert name in page.words
    assert "script" not in page.tags
    text = Path("adapted/index.html").read_text(encoding="utf-8")
    assert "http" not in text
    assert "prefers-color-scheme: dark" in text


def test_a_name_that_is_no_text_is_no_obstacle(run):
    name = b"photos/latin\xe9.png"
    Path("photos").mkdir()
    try:
        Path(os.fsdecode(name)).touch()
    except OSError:
        pytest.skip("this system has names of text only")
    save(SCENES[0], name)
    done = run(*QUICK)
    assert done.returncode == 0, done.stderr
    assert os.path.isfile(b"adapted/predictions/latin\xe9.png")
    page = Page(Path("adapted/index.html").read_text(encoding="utf-8"))
    assert os.path.isfile(b"adapted/" + unquote_to_bytes(page.images[0]["src"]))


def test_photos_that_differ_in_their_ending_alone_keep_pictures_of_their_own(run):
    for name, scene in zip(("a.bmp", "a.jpg", "A.png"), SCENES, strict=False):
        save(scene, f"photos/{name}")
    run(*QUICK)
    stems = [entry["stem"].casefold() for entry in record()["photos"]]
    assert len(set(stems)) == 3
    for stem in (entry["stem"] for entry in record()["photos"]):
        assert Path("adapted", "predictions", f"{stem}.png").is_file()


# --- what can be wrong ------------------------------------------------------------------------


def test_broken_photos_are_skipped_by_name_and_listed_at_the_end(run, photos):
    Path("photos/5.jpg").write_bytes(b"no picture")
    done = run(*QUICK)
    assert done.returncode == 0
    assert "warning: skipped 5.jpg" in done.stderr
    assert "Skipped 1, which could not be read:\n  5.jpg: photos/5.jpg: cannot" in done.stdout
    found = record()
    assert [entry["name"] for entry in found["skipped"]] == ["5.jpg"]
    assert [entry["name"] for entry in found["photos"]] == photos
    assert "5.jpg" in Page(Path("adapted/index.html").read_text()).words


def test_a_folder_in_which_no_photo_can_be_read_is_an_error(run):
    Path("photos").mkdir()
    Path("photos/5.jpg").write_bytes(b"no picture")
    done = run(*QUICK)
    assert done.returncode == 1
    assert "error: none of the 1 images could be read" in done.stderr
    assert not list(Path("adapted").iterdir())


def test_what_was_there_stays_and_what_has_the_same_name_is_replaced(run, photos):
    Path("adapted/predictions").mkdir(parents=True)
    Path("adapted/notes.txt").write_text("mine")
    Path("adapted/predictions/1.png").write_text("old")
    assert run(*QUICK, "--count", 1).returncode == 0
    assert Path("adapted/notes.txt").read_text() == "mine"
    assert ids("adapted/predictions/1.png").shape == (128, 256)


def test_pictures_that_a_run_has_made_are_no_photos(run, photos):
    run(*QUICK, "--out", "photos/first", "--count", 2)
    run(*QUICK, "--out", "photos/second")
    run(*QUICK, "--out", "photos")
    Path("photos/first/adapted.json").unlink()  # as if it had been killed, and is begun again
    run(*QUICK, "--out", "photos/first")
    for out in ("photos/second", "photos", "photos/first"):
        assert [entry["name"] for entry in record(out)["photos"]] == photos
    done = run("adapt", "--images", "photos/compare", "--model", "streets")
    assert done.returncode == 1
    assert "pictures of the kind that this command makes" in done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--model", "cifar10"), "Models that do: cityscapes, streets"),
        (("--model", "street"), "Did you mean 'streets'"),
        (("--method", "eata"), "Methods that need nothing beforehand: alpha_bn, bestta,"),
        (("--method", "tent_reset"), "has to be told when the weather changes"),
        (("--method", "rotta"), "not for segmentation"),
        (("--method", "tnet"), "Did you mean 'tent'"),
        (("--set", "lr"), "--set takes name=value"),
        (("--set", "rhoo=1"), "Did you mean 'rho'"),
        (("--size", "big"), "--size is width x height"),
        (("--size", "16x512"), "sides of 32 to 4096 pixels"),
        (("--state", "none.safetensors"), "no file none.safetensors to go on from"),
        (("--state", "file"), "file is no adapter state"),
        (("--images", "nowhere"), "nowhere is no folder"),
        (("--images", "empty"), "no image in empty"),
        (("--out", "file"), "file is a file; --out names a folder"),
    ],
)
def test_what_cannot_be_done_is_said_at_the_door(run, photos, words, error):
    Path("empty").mkdir()
    Path("file").touch()
    done = run(*QUICK, *words)
    assert done.returncode == 1
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("adapted").exists()


# --- stopped, and going on --------------------------------------------------------------------


def stopping(monkeypatch, at: int, times: int = 1) -> None:
    """Have Ctrl-C pressed while the pictures of photo ``at`` are written."""
    write = cli_adapt._write_pictures
    seen = []

    def pressed(*arguments):
        seen.append(1)
        if len(seen) == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        write(*arguments)

    monkeypatch.setattr(cli_adapt, "_write_pictures", pressed)


def goes_on(stdout: str) -> list[str]:
    """The words of the command that is printed to go on."""
    line = next(line for line in stdout.splitlines() if line.startswith("  bestta "))
    return shlex.split(line)[1:]


def test_a_stopped_run_goes_on_by_the_command_it_prints_as_if_never_stopped(
    run, photos, monkeypatch
):
    os.rename("photos", "my photos")
    words = (*QUICK, "--images", "my photos", "--set", "lr=0.01")
    assert run(*words, "--out", "whole").returncode == 0
    with monkeypatch.context() as patch:
        stopping(patch, at=2)
        done = run(*words, "--out", "parts")
    assert done.returncode == 130
    assert "Stopped after 2 of 5 photos. This goes on:" in done.stdout
    assert len(record("parts")["photos"]) == 2
    assert Path("parts/index.html").read_text().count("<article>") == 2
    assert not Path("parts/predictions/10.png").exists()
    again = goes_on(done.stdout)
    assert again[-2:] == ["--state", "parts/state.safetensors"]
    done = run(*again)
    assert done.returncode == 0, done.stderr
    whole, parts = record("whole"), record("parts")
    for one, other in zip(whole["photos"], parts["photos"], strict=True):
        assert {**one, "time_ms": 0} == {**other, "time_ms": 0}
    for path in Path("whole/predictions").rglob("*.png"):
        assert path.read_bytes() == Path("parts", path.relative_to("whole")).read_bytes()
    expected, state = (
        load_tensors(f"{out}/state.safetensors", "adapter state")[0] for out in ("whole", "parts")
    )
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def test_a_second_ctrl_c_stops_at_once_and_keeps_what_was_finished(run, photos, monkeypatch):
    stopping(monkeypatch, at=2, times=2)
    assert run(*QUICK).returncode != 0
    assert [entry["name"] for entry in record()["photos"]] == ["1.png"]
    assert Path("adapted/state.safetensors").is_file()


def test_ctrl_c_at_the_last_photo_is_no_stop(run, photos, monkeypatch):
    stopping(monkeypatch, at=2)
    done = run(*QUICK, "--count", 2)
    assert done.returncode == 0
    assert "Stopped" not in done.stdout


def test_photos_that_came_later_go_on_from_the_state_by_the_command_that_is_printed(run, photos):
    done = run(*QUICK, "--count", 3)
    again = goes_on(done.stdout)
    assert "--count" not in again
    before = Path("adapted/predictions/1.png").stat().st_mtime_ns
    done = run(*again)
    assert done.returncode == 0, done.stderr
    assert [entry["last"]["images_seen"] for entry in record()["photos"]] == [1, 2, 3, 4, 5]
    assert Path("adapted/predictions/1.png").stat().st_mtime_ns == before
    before = "3 photos done before, 2 new; started from adapted/state.safetensors.\n5 photos in"
    assert done.stdout.startswith(before)
    before = "5 photos done before, 0 new; started from adapted/state.safetensors.\n5 photos in"
    assert run(*again).stdout.startswith(before)


def test_it_ends_with_what_a_run_without_the_state_would_do(run, photos):
    done = run(*QUICK)
    assert "done before" not in done.stdout
    assert "Started from" not in done.stdout
    assert "When there are more photos in photos, this does the new ones only" in done.stdout
    assert "Without --state, all are done again" in done.stdout


def test_a_state_that_is_not_there_is_answered_with_the_command_of_a_first_run(run, photos):
    words = (*QUICK, "--count", 1, "--out", "my own")
    done = run(*words, "--state", "cam.safetensors")
    assert done.returncode == 1
    assert "A first run needs no --state; it writes my own/state.safetensors" in done.stderr
    assert goes_on(done.stderr) == [str(word) for word in words]
    assert run(*goes_on(done.stderr)).returncode == 0
    assert Path("my own/state.safetensors").is_file()


@pytest.mark.parametrize("state", ["cam.safetensors", "adapted"])
def test_a_state_that_is_not_there_is_answered_with_the_one_that_is(run, photos, state):
    run(*QUICK, "--count", 1)
    done = run(*QUICK, f"--state={state}")
    assert done.returncode == 1
    assert "A first run" not in done.stderr, "it would begin anew"
    assert "has written adapted/state.safetensors" in done.stderr
    assert run(*goes_on(done.stderr)).stdout.startswith("1 photo done before, 4 new;")


def test_a_state_begins_another_folder_with_what_was_learned(run, photos):
    run(*QUICK, "--count", 3)
    done = run(*QUICK, "--count", 2, "--out", "other", "--state", "adapted/state.safetensors")
    assert done.returncode == 0, done.stderr
    assert [entry["last"]["images_seen"] for entry in record("other")["photos"]] == [4, 5]
    started = "Started from adapted/state.safetensors, where 3 photos had been seen.\n2 photos in"
    assert done.stdout.startswith(started)


def test_without_a_state_a_run_begins_anew(run, photos):
    run(*QUICK, "--count", 3)
    run(*QUICK, "--count", 2)
    assert [entry["last"]["images_seen"] for entry in record()["photos"]] == [1, 2]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--set", "lr=0.5"), "a run with lr 0.001, this one has 0.5"),
        (("--size", "96x64"), "a run with size [64, 32], this one has [96, 64]"),
        (("--precision", "bf16"), 'a run with precision "fp32", this one has "bf16"'),
        (("--method", "tent"), "holds a state of method 'bestta'"),
    ],
)
def test_one_folder_holds_one_kind_of_run(run, photos, words, error):
    run(*QUICK, "--count", 1)
    before = Path("adapted/adapted.json").read_bytes()
    done = run(*QUICK, "--state", "adapted/state.safetensors", *words)
    assert done.returncode == 1
    assert error in done.stderr
    assert Path("adapted/adapted.json").read_bytes() == before


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"photos": 3}'])
def test_a_record_that_is_none_is_not_gone_on_from(run, photos, text):
    run(*QUICK, "--count", 1)
    Path("adapted/adapted.json").write_text(text)
    done = run(*QUICK, "--state", "adapted/state.safetensors")
    assert done.returncode == 1
    assert "adapted.json is not what bestta adapt writes" in done.stderr


# --- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(16, 8), (1, 1), (7, 5), (40, 33), (16, 40), (3, 100)])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_class_ids_are_those_of_logits_that_are_interpolated_at_once(size, rows, monkeypatch):
    logits = torch.randn(4, 8, 16, dtype=torch.float64)
    width, height = size
    expected = F.interpolate(logits[None], size=(height, width), mode="bilinear").argmax(1)[0]
    largest = []
    interpolate = F.interpolate

    def watched(*arguments, **options):
        wide = interpolate(*arguments, **options)
        largest.append(wide.numel())
        return wide

    monkeypatch.setattr(F, "interpolate", watched)
    assert np.array_equal(class_ids(logits, size, at_once=rows * 4 * width), expected.numpy())
    assert max(largest) <= rows * 4 * width
    assert sum(largest) == 4 * width * height


@pytest.mark.parametrize(
    ("photo", "expected"),
    [
        # By hand. 16:9 is 16×9 steps of 32, 13 % more than 16×8; 4:3 has 12×9 (18 % less) and
        # 13×10 (2 % more, 2.5 % out of shape); nothing is squarer than 11×11 and nearer to 128.
        ((2048, 1024), (512, 256)),
        ((1920, 1080), (512, 288)),
        ((4000, 3000), (416, 320)),
        ((3000, 4000), (320, 416)),
        ((1, 1), (352, 352)),
        ((50_000, 1), (4096, 32)),
        ((1, 50_000), (32, 4096)),
    ],
)
def test_photos_are_brought_to_the_usual_area_in_their_own_shape(photo, expected):
    assert model_size(photo, (512, 256)) == expected


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_sizes_are_multiples_of_32_and_neither_large_nor_out_of_shape(width, height):
    given = model_size((width, height), (512, 256))
    assert given[0] % 32 == given[1] % 32 == 0
    area = given[0] * given[1] / (512 * 256)
    assert 0.5 <= area <= 2
    if 0.25 <= width / height <= 4:
        assert 0.8 < area < 1.25
        assert abs(math.log(given[0] / given[1] * height / width)) < 0.07
