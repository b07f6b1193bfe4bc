"""`bestta.calibrate`: it finds the layer that undoes a shift, the same one every time."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import torch
from torch import nn

import bestta
from bestta.calibration import Condition, run
from bestta.calibration.evaluations import Evaluations
from bestta.calibration.search import Lengths
from nets import Segmenter, TokenClassifier, randomise

CONDITIONS = ["clear", "haze", "darkness"]


@pytest.fixture(autouse=True)
def _few_frames(monkeypatch):
    monkeypatch.setattr(run, "_lengths", lambda *_: Lengths(short=2, full=3, long=4))


@pytest.fixture
def _no_pass(monkeypatch):
    """Fail where the images are gone through."""
    monkeypatch.setattr(bestta.SourceProfile, "collect", lambda *_, **__: pytest.fail("worked"))


class Stages(nn.Module):
    """Linear up to ``stem``; behind it what lies below the middle of each channel is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1)
        self.relu = nn.ReLU()
        self.late = nn.Conv2d(3, 3, 1)
        self.head = nn.Conv2d(3, 4, 1)
        with torch.no_grad():
            for layer in (self.stem, self.late):
                layer.weight.copy_(torch.eye(3).view(3, 3, 1, 1))
                layer.bias.zero_()
            self.stem.bias.fill_(-0.5)
            self.head.weight.zero_()
            self.head.weight[:3, :, 0, 0] = torch.eye(3)
            self.head.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.2]))

    def forward(self, image):
        return self.head(self.late(self.relu(self.stem(image))))


def shuffled(count: int, seed: int = 0) -> torch.Tensor:
    """Images of the same pixels in another order: all have the very same style."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(3, 256, generator=generator)
    orders = [torch.randperm(256, generator=generator) for _ in range(count)]
    return torch.stack([pixels[:, order].view(3, 16, 16) for order in orders])


def dim(pixels, draw):
    return 0.4 * pixels + 0.05


def told(profile):
    """What came of it, without the times."""
    about = dict(profile.provenance["calibration"])
    return {k: v for k, v in about.items() if k not in ("seconds", "when", "played", "resumed")}


def labelled(number: int):
    """Images whose every pixel is of one class."""
    return [(torch.rand(8, 3, 16, 16), torch.full((8, 16, 16), number))]


def small(**more):
    model = randomise(Segmenter(), seed=1)
    images = torch.rand(10, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    return bestta.calibrate(model, images, **{"conditions": CONDITIONS, **more})


def test_the_layer_at_which_a_shift_is_undone_exactly_is_chosen():
    """At ``stem`` features are linear in the pixels, and all images share one style: AdaIN there
    (ρ = 1) gives back the very features of the clear image, so agreement is 100 %.
    """
    model = Stages().eval()
    profile = bestta.calibrate(model, shuffled(12), conditions=[Condition("dim", dim)], rho=1.0)
    about = profile.provenance["calibration"]
    assert list(profile.layers) == ["stem"]
    alone = {c["name"]: c["gain"] for c in about["candidates"]}
    left = 100 - about["source"]["dim"]
    assert left > 20
    assert alone["stem"] == pytest.approx(left, abs=1e-2)
    assert alone["late"] < alone["stem"] - 5
    assert about["helps"]
    assert about["sure"]["share"] == 1.0
    assert about["chosen"]["stream"] == "blocks"  # nothing is remembered, so all frames count
    assert about["chosen"]["gain"] == alone["stem"]
    # Nothing is left to learn, so that nothing dearer can win.
    assert profile.settings["bestta"]["lr"] == 0.0
    assert profile.settings["bestta"]["statistics_decay"] == 0.0
    # What was seen to help need not be proven to the guard once more.
    assert profile.settings["bestta"]["guard_margin"] == 0.0


def test_full_transfer_is_found_where_it_is_right():
    profile = bestta.calibrate(
        Stages().eval(), shuffled(12), conditions=[Condition("dim", dim)], layers=["stem"]
    )
    assert profile.settings["bestta"]["rho"] == 1.0


def test_the_same_images_and_seed_give_the_same_choice_and_another_seed_other_frames():
    first, second, other = small(), small(), small(seed=1)
    assert told(first) == told(second)
    assert list(first.layers) == list(second.layers)
    assert told(first)["steps"] != told(other)["steps"]


def test_a_resumed_calibration_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    whole = small()
    path = tmp_path / "kept.part"
    put = Evaluations.put

    def stop_later(self, key, counts):
        put(self, key, counts)
        if len(self.found) == 4:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does

    monkeypatch.setattr(Evaluations, "put", stop_later)
    with pytest.raises(KeyboardInterrupt, match="goes on from there"):
        small(checkpoint=path)
    monkeypatch.setattr(Evaluations, "put", put)
    resumed = small(checkpoint=path)
    assert told(resumed) == told(whole)
    about = resumed.provenance["calibration"]
    assert about["resumed"] == 4
    assert about["played"] < whole.provenance["calibration"]["played"]


def test_a_checkpoint_of_other_images_is_refused(tmp_path):
    path = tmp_path / "kept.part"
    small(checkpoint=path, minutes=1e-6)
    with pytest.raises(ValueError, match="begun with something else: seed was 0 and is 3"):
        small(checkpoint=path, seed=3)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no calibration checkpoint"):
        small(checkpoint=path)


def test_a_search_that_is_out_of_time_takes_the_best_so_far():
    about = small(minutes=1e-6).provenance["calibration"]
    assert about["cut_short"]
    assert about["played"] == 1
    assert about["chosen"]["layers"] == ["layer1"]  # the first stage is the first to be tried


def test_however_little_time_there_is_every_image_enters_the_statistics(tmp_path):
    """A pass cut short by the clock would end elsewhere each time, and no checkpoint would fit."""
    path = tmp_path / "kept.part"
    assert small(minutes=1e-6, checkpoint=path).images == 10
    again = small(minutes=1e-6, checkpoint=path)
    assert again.images == again.provenance["calibration"]["images"] == 10
    assert again.provenance["calibration"]["resumed"] == 1


def test_without_labels_the_source_agrees_with_itself_and_with_labels_it_may_not():
    assert small(minutes=1e-6).provenance["calibration"]["source"]["clear"] == 100
    model = randomise(Segmenter(), seed=1)
    images = torch.rand(10, 1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    wrong = torch.zeros(1, 16, 16, dtype=torch.long)
    labelled = [(image, wrong) for image in images]
    about = bestta.calibrate(model, labelled, conditions=CONDITIONS, minutes=1e-6).provenance[
        "calibration"
    ]
    assert about["labels"]
    # One class is labelled: its IoU is the share of pixels that are predicted so.
    assert about["source"]["clear"] < 100


def test_where_nothing_helps_the_calibration_says_so():
    about = small(conditions=["clear"]).provenance["calibration"]
    assert not about["helps"]
    assert about["chosen"]["gain"] <= 0.1


def test_a_classifier_that_nothing_helps_asks_the_guard_for_proof_of_a_gain():
    """Weighed statistics would otherwise be trusted without."""
    model = randomise(TokenClassifier(), seed=3)
    images = torch.rand(10, 1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    profile = bestta.calibrate(model, images, conditions=["clear"])
    assert not profile.provenance["calibration"]["helps"]
    weighed = {"statistics": "weighed", "statistics_decay": 0.99}
    adapter = bestta.adapt(model, profile, guard=True, **weighed)
    adapter(images[0])
    assert adapter.guard.margin == 1.0


def test_expected_images_count_double_and_labelled_ones_are_a_stream_of_their_own():
    dusk = torch.rand(4, 3, 20, 12) * 0.2
    label = torch.zeros(1, 16, 16, dtype=torch.long)
    night = [(torch.rand(1, 3, 16, 16), label)] * 2
    about = small(expected={"dusk": dusk, "night": night}, minutes=1e-6)
    weights = about.provenance["calibration"]["weights"]
    assert weights == {"clear": 1, "haze": 1, "darkness": 1, "dusk": 2, "night": 2}
    assert set(about.provenance["calibration"]["candidates"][0]["conditions"]) == set(weights)


def test_the_profile_keeps_choice_and_reasons_in_its_file(tmp_path):
    profile = small(minutes=1e-6, report=tmp_path / "page.html")
    profile.save(tmp_path / "profile.safetensors")
    model = randomise(Segmenter(), seed=1)
    again = bestta.SourceProfile.load(tmp_path / "profile.safetensors", model)
    assert again.settings == profile.settings
    assert again.provenance["calibration"] == profile.provenance["calibration"]
    with bestta.adapt(model, tmp_path / "profile.safetensors") as adapter:
        assert list(adapter.config.layers) == again.provenance["calibration"]["chosen"]["layers"]
        assert adapter.config.rho == again.settings["bestta"]["rho"]
        assert adapter.config.lr == 0
    page = (tmp_path / "page.html").read_text()
    assert "layer1" in page
    assert page.count("data:image/png") == 3
    assert "cut short" in page


def test_classifiers_of_tokens_are_calibrated_too():
    model = randomise(TokenClassifier(), seed=3)
    images = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    profile = bestta.calibrate(model, images, conditions=["haze"], layers=["patch", "block"])
    about = profile.provenance["calibration"]
    assert about["task"] == "classification"
    assert set(profile.layers) <= {"patch", "block"}
    assert about["source"]["haze"] <= 100


def test_settings_that_are_given_stay_as_they_are():
    settings = small(rho=0.4, lr=1e-3, statistics_decay=0.5).settings["bestta"]
    assert (settings["rho"], settings["lr"], settings["statistics_decay"]) == (0.4, 1e-3, 0.5)


def test_a_model_in_bfloat16_under_inference_mode_is_calibrated_all_the_same():
    model = randomise(Segmenter(), seed=1).to(torch.bfloat16)
    with torch.inference_mode():
        images = torch.rand(8, 3, 16, 16).to(torch.bfloat16)
        profile = bestta.calibrate(model, images, conditions=["haze"], lr=1e-3, layers=["layer1"])
    assert profile.settings["bestta"]["lr"] == 1e-3


def test_the_model_is_left_as_it_was():
    model = randomise(Segmenter(), seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bestta.calibrate(model, torch.rand(8, 3, 16, 16), conditions=["haze"], minutes=1e-6)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("images", "more", "error"),
    [
        ([], {}, "no images to calibrate with"),
        (torch.rand(3, 3, 16, 16), {}, "3 images are too few .* some hundreds are wanted"),
        (torch.rand(8, 3, 16, 16), {"minutes": 0}, "minutes must be a number above 0"),
        (torch.rand(8, 3, 16, 16), {"layers": ["layer9"]}, "no module named 'layer9'"),
        (torch.rand(8, 3, 16, 16), {"layers": []}, "layers are one or more"),
        (torch.rand(8, 3, 16, 16), {"conditions": ["hail"]}, "no condition is called 'hail'"),
        (torch.rand(8, 3, 16, 16), {"method": "tent"}, "chooses layers and settings of 'bestta'"),
        (torch.rand(8, 3, 16, 16), {"roh": 1.0}, "no setting 'roh'"),
        (torch.rand(8, 3, 16, 16), {"pixels": (1.0, 0.0)}, "is not below white"),
        (torch.rand(8, 3, 16, 16), {"expected": []}, "no images of the expected condition"),
        (np.zeros((8, 3, 16, 16)), {}, "images are tensors"),
        (torch.rand(8, 3, 16, 16), {"pixels": (0.0, 0.5)}, "and the images go from"),
        (torch.rand(8, 3, 16, 16), {"expected": {"haze": torch.rand(2, 3, 16, 16)}}, "'my haze'"),
        (labelled(5), {}, r"name class 5; the model has 5, 0 to 4, and 255 is left out"),
        (labelled(255), {}, "every label of the images is 255"),
        ([(torch.rand(8, 3, 16, 16), torch.zeros(8).long())], {}, "are one number, .* maps"),
        (
            torch.rand(8, 3, 16, 16),
            {"conditions": [Condition("cut", lambda pixels, draw: pixels[:, ::2])]},
            r"condition 'cut' made \(3, 8, 16\) of pixels \(3, 16, 16\)",
        ),
        (
            torch.rand(8, 3, 16, 16),
            {"conditions": [Condition("lost", lambda pixels, draw: pixels / 0 * 0)]},
            "768 of them not finite",
        ),
    ],
)
def test_what_cannot_be_calibrated_with_is_a_value_error(images, more, error):
    model = randomise(Segmenter(), seed=1)
    with pytest.raises(ValueError, match=error):
        bestta.calibrate(model, images, **more)


@pytest.mark.usefixtures("_no_pass")
@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"minutes": "5"}, "minutes must be a number above 0, .*; got '5'"),
        ({"minutes": True}, "minutes must be a number"),
        ({"seed": "x"}, "seed is a whole number; got 'x'"),
        ({"seed": 1.5}, "seed is a whole number; got 1.5"),
        ({"layers": 3}, "layers are named as .*; got 3"),
        ({"layers": [3]}, "layers are named as"),
        ({"images": None}, r"images are batches \(B, 3, H, W\), .*; got None"),
        ({"images": 3}, "images are batches"),
        ({"images": "photos"}, "images are batches"),
        ({"expected": 3}, "expected are batches of images, .*; got 3"),
        ({"expected": {"dusk": 3}}, "expected are batches of images, .*; got {'dusk': 3}"),
        ({"conditions": 3}, "conditions are names"),
        ({"conditions": [3]}, "no condition is called 3"),
        ({"conditions": [["haze"]]}, "no condition is called .'haze'."),
        ({"conditions": ["hail"]}, "no condition is called 'hail'"),
        ({"pixels": 3}, r"pixels are \(black, white\), .* 3 of them, one a channel; got 3"),
        ({"pixels": ("0", "1")}, "pixels are .black, white."),
        ({"pixels": (0,)}, "pixels are .black, white."),
        ({"pixels": ([0, 0], [1, 1])}, "pixels are .black, white."),
        ({"pixels": (1.0, 0.0)}, "is not below white"),
        ({"rho": "x"}, "rho must lie in .*, not 'x'"),
        ({"guard_margin": "x"}, "guard_margin is a number of points, not 'x'"),
        ({"embedding": "map"}, "calibrate takes no embedding='map'"),
        ({"report": 3}, "report is the path of a file, such as 'page.html'; got 3"),
        ({"checkpoint": 3}, "checkpoint is the path of a file"),
    ],
)
def test_what_is_of_the_wrong_kind_is_an_error_before_the_images_are_gone_through(more, error):
    given = {"images": torch.rand(8, 3, 16, 16), **more}
    with pytest.raises(ValueError, match=error):
        bestta.calibrate(randomise(Segmenter(), seed=1), **given)


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="is in training mode"):
        bestta.calibrate(Segmenter(), torch.rand(8, 3, 16, 16))


def test_a_dearer_choice_must_win_by_the_margin():
    """Where all options gain the same, one layer, the preset's ρ and no learning are kept."""
    profile = small(conditions=["clear"], rho=0.0)  # the identity, wherever it is put
    assert len(profile.layers) == 1
    assert profile.settings["bestta"]["lr"] == 0.0
    assert profile.provenance["calibration"]["chosen"]["gain"] == 0


def test_what_is_given_stays_though_time_is_up_before_it_is_tried():
    settings = small(minutes=1e-6, lr=0.01, statistics_decay=0.9).settings["bestta"]
    assert (settings["lr"], settings["statistics_decay"]) == (0.01, 0.9)


def test_a_checkpoint_of_another_condition_of_the_same_name_is_not_taken_up(tmp_path):
    path = tmp_path / "calibration.json"
    small(conditions=[Condition("mine", dim)], checkpoint=path, lr=0.0)
    again = small(conditions=[Condition("mine", dim)], checkpoint=path, lr=0.0)
    assert again.provenance["calibration"]["played"] == 0
    other = Condition("mine", lambda pixels, draw: 1 - pixels)
    with pytest.raises(ValueError, match="conditions' looks was"):
        small(conditions=[other], checkpoint=path, lr=0.0)


@pytest.mark.usefixtures("_no_pass")
@pytest.mark.parametrize("name", ["report", "checkpoint"])
def test_a_file_that_cannot_be_written_is_an_error_before_any_work(name, tmp_path, monkeypatch):
    with pytest.raises(IsADirectoryError, match=f"{name} names a file, and .* is a folder"):
        small(**{name: tmp_path})
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is a file"):
        small(**{name: tmp_path / "file" / "in it"})
    monkeypatch.setattr("os.access", lambda *_: False)  # to root all folders are open
    with pytest.raises(PermissionError, match=f"no permission to write in {tmp_path}"):
        small(**{name: str(tmp_path / "new" / "one")})


def test_labels_of_some_images_only_are_left_aside_and_that_is_said():
    images = torch.rand(10, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    some = [(image[None], torch.zeros(1, 16, 16).long()) for image in images[:4]]
    model = randomise(Segmenter(), seed=1)
    with pytest.warns(UserWarning, match="4 of 10 images have labels"):
        profile = bestta.calibrate(model, [*some, *images[4:, None]], conditions=CONDITIONS)
    assert told(profile)["labels"] is False


def test_whole_numbers_are_labels_of_single_images():
    images = torch.rand(10, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    model = randomise(TokenClassifier(), seed=1)
    profile = bestta.calibrate(
        model, [(image[None], 3) for image in images], conditions=["clear", "haze"], lr=0.0
    )
    assert told(profile)["labels"] is True


def test_images_that_use_next_to_nothing_of_the_range_are_warned_of():
    with pytest.warns(UserWarning, match="a small part of pixels"):
        small(pixels=(0.0, 255.0), lr=0.0)


class YesOrNo(nn.Module):
    """One channel: bright, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1)
        self.head = nn.Conv2d(3, 1, 1)
        with torch.no_grad():
            self.stem.weight.copy_(torch.eye(3).view(3, 3, 1, 1))
            self.stem.bias.zero_()
            self.head.weight.fill_(4.0)
            self.head.bias.fill_(-6.0)

    def forward(self, image):
        return self.head(self.stem(image))


@pytest.mark.guarded
def test_a_model_of_one_channel_says_yes_or_no_and_is_helped_like_any_other():
    """In the dark it says no to everything, until what is dark is made bright again."""
    model, images = YesOrNo().eval(), shuffled(12)
    profile = bestta.calibrate(
        model, images, conditions=["clear", Condition("dim", dim)], pixels=(0.0, 1.0), lr=0.0
    )
    assert told(profile)["source"]["dim"] < 60
    assert told(profile)["helps"]
    adapter = bestta.adapt(model, profile)
    for image in images[:, None]:
        right = model(image) > 0
        agreed = ((adapter(dim(image, None)) > 0) == right).float().mean()
        assert agreed > 0.95
        assert ((model(dim(image, None)) > 0) == right).float().mean() < 0.7
