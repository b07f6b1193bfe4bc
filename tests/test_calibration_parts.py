"""The parts of a calibration: candidates, conditions, streams and scores, each by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bestta.calibration import Condition
from bestta.calibration.candidates import candidates, named, spread
from bestta.calibration.conditions import PLAIN, WEATHERS, conditions_for, drawing, look_of
from bestta.calibration.scoring import Judge, count
from bestta.calibration.search import HARMLESS_RHO, RHO
from bestta.calibration.streams import Memory, Picture, Pixels, Streams
from bestta.models import WideResNet, load
from bestta.reports.calibration import png, render
from nets import Classifier, Segmenter, TokenClassifier, randomise

IMAGE = torch.zeros(1, 3, 16, 16)


def names(model, image=IMAGE, **more):
    return [c.name for c in candidates(model.eval(), image, **more)]


# --- candidates -----------------------------------------------------------------------------


def test_of_a_plain_network_every_operation_but_the_last_is_a_candidate():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.Conv2d(6, 2, 1)
    )
    # "1" is the batch norm of "0": one affine map per channel further, which BeIN undoes.
    assert names(model) == ["0", "2", "3"]


def test_a_stage_stands_for_its_last_block():
    assert names(Segmenter()) == ["layer1", "layer2", "layer3", "layer4"]


def test_stages_come_before_what_lies_inside_them():
    found = candidates(WideResNet(depth=10, width=1, classes=3).eval(), torch.zeros(1, 3, 32, 32))
    stages = [c.name for c in found if c.level == 0]
    assert stages == ["conv1", "block1", "block2", "block3", "relu"]
    assert (
        names(WideResNet(depth=16, width=1, classes=3), torch.zeros(1, 3, 32, 32), most=5) == stages
    )
    assert [c.depth for c in found] == sorted(c.depth for c in found)


def test_tokens_and_group_norms_have_candidates():
    assert {"patch", "block"} <= set(names(TokenClassifier()))
    grouped = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    # A group norm looks at the image: what BeIN does before it is not what it does behind it.
    assert names(grouped) == ["0", "1", "2"]


def test_of_a_shipped_segmenter_neither_logits_nor_pooled_features_are_candidates():
    found = candidates(load("streets"), torch.zeros(1, 3, 128, 256))
    assert len(found) <= 24
    assert {"backbone.layer1", "backbone.layer4", "aspp", "decoder.refine"} <= {
        c.name for c in found
    }
    assert "aspp.pooling" not in {c.name for c in found}  # one position
    assert all(c.positions >= 16 for c in found)
    assert found[-1].channels != 19


def test_named_layers_come_in_the_order_they_run():
    assert [c.name for c in named(Segmenter().eval(), IMAGE, ["layer3", "layer1"])] == [
        "layer1",
        "layer3",
    ]
    model = Classifier().eval()
    model.spare = nn.Conv2d(3, 3, 1)
    with pytest.raises(ValueError, match="never ran"):
        named(model, IMAGE, ["spare"])


@pytest.mark.parametrize("most", [0, 1, 2, 7, 30])
def test_a_spread_keeps_first_and_last_and_no_more_than_asked(most):
    items = [str(n) for n in range(20)]
    kept = spread(items, most)
    assert len(kept) == min(most, 20)
    assert kept == sorted(set(kept), key=items.index)
    if most > 1:
        assert (kept[0], kept[-1]) == ("0", "19")


# --- conditions -----------------------------------------------------------------------------


@pytest.mark.parametrize("condition", PLAIN, ids=lambda c: c.name)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_condition_is_a_function_of_pixels_and_words(condition, channels):
    pixels = torch.rand(channels, 20, 30, generator=torch.Generator().manual_seed(0))
    before = pixels.clone()
    shown = condition(pixels, 7, 1)
    assert pixels.equal(before)
    assert shown.shape == pixels.shape
    assert 0 <= float(shown.min()) <= float(shown.max()) <= 1
    assert shown.equal(condition(pixels, 7, 1))
    assert shown.equal(condition(pixels, 7, 2)) == (condition.name == "clear")


def test_noise_counts_less_than_weather_and_weather_is_for_streets():
    weights = {c.name: c.weight for c in conditions_for("segmentation", (3, 128, 256))}
    assert weights["noise"] == weights["blur"] == 0.25
    assert weights["fog"] == weights["night"] == weights["haze"] == 1
    assert "fog" not in {c.name for c in conditions_for("classification", (3, 224, 224))}
    assert "fog" not in {c.name for c in conditions_for("segmentation", (3, 32, 32))}


def test_low_contrast_and_defocus_are_left_out_where_weather_is_painted_and_blur_elsewhere():
    plain = {c.name for c in PLAIN}
    painted = {c.name for c in conditions_for("segmentation", (3, 64, 128))}
    assert plain - painted == {"low contrast", "defocus"}
    assert painted - plain == {"fog", "night", "rain", "snow"}
    for shape in ((3, 63, 128), (1, 64, 128)):
        assert plain - {c.name for c in conditions_for("segmentation", shape)} == {"blur"}


def test_the_docs_name_every_condition_with_its_weight_and_every_rho_that_is_tried():
    page = (Path(__file__).parents[1] / "docs" / "calibration.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.lstrip().startswith("|")]
    counts = {"1": 1.0, "½": 0.5, "¼": 0.25}
    told = {first.strip(): second.strip() for first, second, *_ in rows if second.strip()}
    for condition in (*PLAIN, *WEATHERS):
        (row,) = (name for name in told if told[name] in counts and condition.name in name)
        assert counts[told[row]] == condition.weight
        elsewhere = condition.name in ("low contrast", "defocus")
        assert ("where no weather is painted" in row) == elsewhere
    assert all(str(rho) in told["ρ"] for rho in (*RHO, HARMLESS_RHO))


def test_the_look_of_an_image_is_its_mean_and_deviation():
    pixels = torch.rand(3, 16, 24)
    other = torch.rand(3, 16, 24) * 0.2 + torch.tensor([0.1, 0.3, 0.5]).view(3, 1, 1)
    given = look_of([other])(pixels, drawing(0))
    assert given.mean((1, 2)).allclose(other.mean((1, 2)), atol=1e-5)
    assert given.std((1, 2)).allclose(other.std((1, 2)), rtol=1e-4)
    # What is where stays: the phases are the image's own.
    together = torch.corrcoef(torch.stack([given[0].flatten(), pixels[0].flatten()]))
    assert together[0, 1] > 0.9


# --- streams --------------------------------------------------------------------------------


def test_pixels_and_images_are_the_same_thing_in_other_units():
    pixels = Pixels((-2.0, -1.5, 0.0), (2.5, 2.0, 255.0))
    image = torch.rand(3, 4, 4) * 2
    assert pixels.normalised(pixels.shown(image)).allclose(image, atol=1e-5)
    assert pixels.shown(torch.tensor([-2.0, 2.0, 255.0]).view(3, 1, 1)).flatten().tolist() == [
        0, 1, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("count", [3, 8, 9, 100])
def test_what_is_remembered_is_spread_over_all_images(count):
    memory = Memory(4)
    images = [torch.full((1, 1, 2, 2), float(n)) for n in range(count)]
    assert len(list(memory.watch(images))) == memory.count == count
    kept = [int(p.image[0, 0, 0]) for p in memory.kept()]
    assert len(kept) == min(4, count)
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] >= count * 0.8 - 1
    assert (float(memory.low), float(memory.high)) == (0, count - 1)


def streams(model, **more):
    pictures = [Picture(image) for image in torch.rand(4, 3, 16, 16)]
    pixels = Pixels((0.0,) * 3, (1.0,) * 3)
    return Streams(model, "segmentation", pictures, PLAIN[:3], pixels, **more)


def test_the_source_model_is_perfect_on_clear_frames_by_its_own_measure():
    played = streams(randomise(Segmenter(), seed=1))
    judge = Judge("segmentation", {"clear": 1.0}, seed=0)
    assert judge.scores("clear", played.source("clear", 3))[0] == 100


def test_in_a_spell_the_weather_stays_and_the_images_change():
    seen = []

    def note(pixels, draw):
        seen.append((float(pixels.sum()), float(draw.random())))
        return pixels

    played = streams(randomise(Segmenter(), seed=1))
    played.conditions["haze"] = Condition("haze", note)
    for n in range(4):
        played.frame("haze", n, spell=2)
    assert len({image for image, _ in seen}) == 4
    drawn = [draw for _, draw in seen]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


# --- scores ---------------------------------------------------------------------------------


def right(*answers):
    """Frames of a classification: right or not."""
    target = torch.tensor(1)
    return [count("classification", torch.tensor(int(a)), target, 3) for a in answers]


def test_a_gain_is_the_difference_of_scores_and_sure_when_every_frame_agrees():
    judge = Judge("classification", {"haze": 1.0}, seed=0)
    gain = judge.gain({"haze": right(1, 1, 1, 0)}, {"haze": right(1, 0, 0, 0)})
    assert gain.value == pytest.approx(50)  # 3 of 4 against 1 of 4
    # Each frame gains 0 or 100, two of four: the standard error of their mean is 50/√4 = 25.
    assert gain.error == pytest.approx(25, rel=0.2)
    assert gain.over(gain) == (0, 0)
    assert not gain.beats(gain)
    sure = judge.gain({"haze": right(1, 1)}, {"haze": right(0, 0)})
    assert (sure.value, sure.error) == (100, 0)
    nothing = judge.gain({"haze": right(0, 0)}, {"haze": right(0, 0)})
    assert sure.beats(nothing)


def test_conditions_count_by_their_weight():
    judge = Judge("classification", {"haze": 1.0, "noise": 0.25}, seed=0)
    counts = {"haze": right(1, 1), "noise": right(0, 0)}
    source = {"haze": right(0, 0), "noise": right(1, 1)}
    gain = judge.gain(counts, source)
    assert gain.value == pytest.approx((100 - 0.25 * 100) / 1.25)
    assert gain.conditions == {"haze": 100, "noise": -100}


def test_the_score_of_a_segmentation_is_the_mean_iou_of_summed_pixels():
    judge = Judge("segmentation", {"haze": 1.0}, seed=0)
    target = torch.tensor([[0, 0, 1, 1]])
    frames = [
        count("segmentation", torch.tensor([[0, 1, 1, 1]]), target, 3),
        count("segmentation", torch.tensor([[0, 0, 1, 2]]), torch.tensor([[0, 0, 1, 255]]), 3),
    ]
    # Class 0: 3 of 4 pixels, none too many. Class 1: 3 right of 3, and one too many. Class 2 is
    # not in the target, and its one pixel is ignored.
    assert judge.scores("haze", frames)[0] == pytest.approx(100 * (3 / 4 + 3 / 4) / 2)


def test_resamples_are_the_same_for_all_settings():
    judge = Judge("classification", {"haze": 1.0}, seed=0)
    a, b = (judge.scores("haze", right(1, 0, 1)) for _ in range(2))
    assert np.array_equal(a, b)
    assert a.shape == (201,)


# --- the page -------------------------------------------------------------------------------


def test_a_picture_in_the_page_is_the_one_it_was():
    from io import BytesIO

    from PIL import Image

    picture = np.random.default_rng(0).integers(0, 255, (5, 7, 3)).astype(np.uint8)
    assert np.array_equal(np.asarray(Image.open(BytesIO(png(picture)))), picture)


def page_of(candidates, **chosen):
    """What a page is made from."""
    return {
        "model": "<Net>", "task": "segmentation", "images": 8, "seed": 0, "seconds": 3.0,
        "labels": False, "helps": True, "cut_short": False, "when": "now",
        "weights": {"<b>": 1.0}, "source": {"<b>": 50.0}, "steps": [],
        "frames": {"short": 2, "full": 3, "long": 4},
        "sure": {"share": None, "runner_up": [], "ahead": None, "error": None},
        "chosen": {
            "stream": "blocks", "frames": 3, "conditions": {}, "gain": 1.0, "error": 0.1,
            "settings": {"rho": 0.7, "lr": 0.0, "statistics_decay": 0.0, "lambda_entropy": 0.3},
            **chosen,
        },
        "candidates": candidates,
    }  # fmt: skip


def alone(name, gain=1.0, frames=3):
    conditions = {"<b>": gain}
    about = {"name": name, "channels": 3, "gain": gain, "error": 0.1}
    return {**about, "frames": frames, "conditions": conditions}


def test_names_are_escaped_in_the_page():
    page = render(page_of([alone("<i>")], layers=["<i>"]), {"<b>": np.zeros((2, 2, 3), np.uint8)})
    assert "<i>" not in page
    assert "<Net>" not in page
    assert "&lt;i&gt;" in page


def test_the_page_puts_layers_that_saw_all_frames_first_and_tells_the_frames_of_each():
    tried = [alone("early", 17.4, frames=2), alone("winner", 13.6), alone("third", 9.1)]
    page = render(page_of([*tried, {"name": "failed"}], layers=["winner"]), {})
    bars, table = page.split("In each condition")
    assert bars.index("early: +17.4") < bars.index("winner: +13.6")  # here in the order they run
    assert "early: +17.4 ± 0.1 over 2 frames" in bars
    assert bars.count('class="bar few"') == 1
    rows = ["winner</th><td>3</td>", "third</th><td>3</td>", "early</th><td>2</td>"]
    assert [table.index(row) for row in rows] == sorted(table.index(row) for row in rows)
