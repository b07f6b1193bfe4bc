"""The source profile: what it holds, how it is collected, and when it is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bestta
import oracle
from bestta import SourceProfile
from bestta.files import load_tensors, save_tensors
from bestta.profile import ModelIdentity, check_image
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, snapshot, stream

LAYERS = ["layer1", "layer3"]


def features_at_layer1(model: Segmenter, image: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.layer1(image)


def test_style_is_the_mean_of_the_images_own_statistics(segmenter):
    images = stream(6, seed=4)
    profile = SourceProfile.collect(segmenter, images, layers="layer1")
    statistics = [
        oracle.instance_statistics(features_at_layer1(segmenter, x).double(), eps=0) for x in images
    ]
    layer = profile.layers["layer1"]
    torch.testing.assert_close(layer.mu, torch.stack([m.flatten() for m, _ in statistics]).mean(0))
    torch.testing.assert_close(
        layer.sigma, torch.stack([s.flatten() for _, s in statistics]).mean(0)
    )
    torch.testing.assert_close(layer.embedding("pooled"), layer.mu)


def test_how_the_images_are_batched_changes_nothing(segmenter):
    images = torch.cat(stream(7, seed=4))
    one_by_one = SourceProfile.collect(segmenter, images, layers=LAYERS)
    in_batches = SourceProfile.collect(segmenter, images.split(3), layers=LAYERS)
    assert in_batches.images == one_by_one.images == 7
    for name in LAYERS:
        torch.testing.assert_close(
            one_by_one.layers[name].mu, in_batches.layers[name].mu, rtol=1e-6, atol=1e-7
        )
        torch.testing.assert_close(
            one_by_one.layers[name].sigma, in_batches.layers[name].sigma, rtol=1e-6, atol=1e-7
        )


def test_a_data_loader_over_a_labelled_set_works_as_it_is(segmenter):
    images = torch.cat(stream(4, seed=4))
    loader = DataLoader(TensorDataset(images, torch.zeros(4)), batch_size=2)
    labelled = SourceProfile.collect(segmenter, loader, layers="layer1")
    plain = SourceProfile.collect(segmenter, images.split(2), layers="layer1")
    assert torch.equal(labelled.layers["layer1"].mu, plain.layers["layer1"].mu)


def test_images_of_several_sizes_go_into_one_profile(segmenter):
    images = [*stream(2, seed=1, size=12), *stream(3, seed=2, size=20)]
    profile = SourceProfile.collect(segmenter, images, layers="layer1")
    assert profile.images == 5
    assert profile.provenance["sizes"] == {"12x12": 2, "20x20": 3}


def test_images_are_consumed_as_they_come(segmenter):
    """A generator that holds no image alive: at any time no more than one is in use."""
    import weakref

    alive: list[weakref.ref] = []
    most = 0

    def generate():
        nonlocal most
        for image in iter(lambda: torch.randn(1, 3, 12, 12), None):
            alive.append(weakref.ref(image))
            most = max(most, sum(ref() is not None for ref in alive))
            yield image
            if len(alive) == 30:
                return
            del image

    SourceProfile.collect(segmenter, generate(), layers="layer1")
    assert most <= 2


def test_merging_equals_collecting_together(segmenter):
    images = stream(9, seed=4)
    whole = SourceProfile.collect(segmenter, images, layers=LAYERS, embedding="map")
    first = SourceProfile.collect(segmenter, images[:2], layers=LAYERS, embedding="map")
    second = SourceProfile.collect(segmenter, images[2:], layers=LAYERS, embedding="map")
    merged = first.merge(second)
    assert merged.images == 9
    by_hand = torch.cat([features_at_layer1(segmenter, x) for x in images]).mean(0)
    torch.testing.assert_close(merged.layers["layer1"].embedding("map"), by_hand)
    for name in LAYERS:
        for ours, expected in zip(
            vars(merged.layers[name]).values(), vars(whole.layers[name]).values(), strict=True
        ):
            torch.testing.assert_close(ours, expected)


def test_the_spread_is_the_variance_of_the_images_own_statistics(segmenter):
    """By torch.var over all images at once, whatever batches they came in."""
    images = [image * (1 + i) for i, image in enumerate(stream(7, seed=4))]
    batches = [torch.cat(images[:3]), torch.cat(images[3:4]), torch.cat(images[4:])]
    seen = SourceProfile.collect(segmenter, batches, layers="layer1").layers["layer1"]
    features = torch.cat([features_at_layer1(segmenter, x) for x in images]).double()
    mean, deviation = features.mean((2, 3)), features.var((2, 3), correction=0).sqrt()
    torch.testing.assert_close(seen.mu_spread, mean.var(0, correction=0), rtol=1e-4, atol=1e-8)
    expected = deviation.var(0, correction=0)
    torch.testing.assert_close(seen.sigma_spread, expected, rtol=1e-4, atol=1e-8)


def test_collecting_leaves_the_model_as_it_was(segmenter):
    before = snapshot(segmenter)
    SourceProfile.collect(segmenter, stream(3, seed=4), layers=LAYERS)
    assert same(before, snapshot(segmenter))
    assert all(p.requires_grad for p in segmenter.parameters())
    assert not any(m._forward_hooks for m in segmenter.modules())


def test_task_is_told_from_the_logits(segmenter, classifier):
    tasks = [
        SourceProfile.collect(m, stream(1, seed=1), layers="layer1").task
        for m in (segmenter, classifier)
    ]
    assert tasks == ["segmentation", "classification"]


def test_tokens_are_profiled_along_their_last_axis():
    model = randomise(TokenClassifier(), seed=5)
    profile = SourceProfile.collect(model, stream(2, seed=1), layers="block")
    assert profile.layers["block"].mu.shape == (8,)


def test_channels_may_lie_elsewhere():
    # Behind the flattening, features are (B, C, L): rank three, but not tokens.
    pool, unflatten = nn.AdaptiveAvgPool1d(3), nn.Unflatten(2, (1, 3))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(2), pool, unflatten).eval()
    images = stream(2, seed=1)
    profile = SourceProfile.collect(model, images, layers="1", channel_dim={"1": 1})
    assert profile.layers["1"].mu.shape == (4,)
    adapter = bestta.adapt(model, profile)
    adapter(images[0])
    assert adapter.last.adapted


def test_saving_and_loading_gives_back_the_same_profile(segmenter, tmp_path):
    profile = SourceProfile.collect(
        segmenter, stream(3, seed=4), layers=LAYERS, embedding="map", note="sunny"
    )
    profile = replace(
        profile,
        settings={"bestta": {"rho": 0.4, "layers": ["layer3"]}},
        output="logits",
        layers={n: replace(p, channel_dim=1) for n, p in profile.layers.items()},
    )
    profile.save(tmp_path / "profile.safetensors")
    loaded = SourceProfile.load(tmp_path / "profile.safetensors", segmenter)
    for name in LAYERS:
        for key in ("mu", "sigma", "embedding_map"):
            assert torch.equal(
                getattr(loaded.layers[name], key), getattr(profile.layers[name], key)
            )
    assert loaded.answers is not None
    assert profile.answers is not None
    assert torch.equal(loaded.answers.histogram, profile.answers.histogram)
    assert torch.equal(loaded.answers.entropy, profile.answers.entropy)
    assert replace(loaded, layers=profile.layers, answers=profile.answers) == profile
    assert list(loaded.layers) == list(profile.layers)
    assert [layer.channel_dim for layer in loaded.layers.values()] == [1, 1]


def test_a_bad_source_image_is_left_out_and_counted(segmenter):
    images = stream(4, seed=4)
    good = SourceProfile.collect(segmenter, images, layers="layer1")
    bad = torch.full((1, 3, 12, 12), float("nan"))
    with pytest.warns(UserWarning, match="1 source images gave NaN"):
        profile = SourceProfile.collect(segmenter, [*images, bad], layers="layer1")
    assert profile.images == 4
    assert profile.provenance["skipped"] == 1
    assert torch.equal(profile.layers["layer1"].mu, good.layers["layer1"].mu)


@pytest.mark.parametrize("fault", ["NaN pixel", "infinite variance"])
def test_a_bad_image_does_not_take_its_batch_with_it(segmenter, fault):
    images = torch.cat(stream(4, seed=4))
    good = SourceProfile.collect(segmenter, images, layers="layer1")
    bad = images[:1].clone()
    if fault == "NaN pixel":
        bad[0, 0, 0, 0] = float("nan")
    else:  # finite pixels, and features whose mean is finite too
        bad *= 1e25
    with pytest.warns(UserWarning, match="1 source images"):
        profile = SourceProfile.collect(segmenter, [torch.cat([bad, images])], layers="layer1")
    assert profile.images == 4
    torch.testing.assert_close(profile.layers["layer1"].mu, good.layers["layer1"].mu)
    torch.testing.assert_close(profile.layers["layer1"].sigma, good.layers["layer1"].sigma)


def test_an_image_that_overflows_only_at_a_later_layer_is_left_out():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Conv2d(2, 2, 1)).eval()
    nn.init.constant_(model[1].weight, 1e15)
    images = stream(3, seed=4)
    with pytest.warns(UserWarning, match="1 source images"):
        profile = SourceProfile.collect(model, [*images, images[0] * 1e12], layers=["0", "1"])
    assert profile.images == 3


# --- identity -------------------------------------------------------------------------------


def test_the_same_weights_in_another_precision_or_layout_are_the_same_model(segmenter):
    identity = ModelIdentity.of(segmenter)
    assert ModelIdentity.of(segmenter.to(memory_format=torch.channels_last)) == identity
    assert ModelIdentity.of(segmenter.bfloat16()) == identity


def test_any_changed_weight_or_running_statistic_makes_another_model(segmenter):
    prints = {ModelIdentity.of(segmenter).fingerprint}
    for tensor in (segmenter.head.weight, segmenter.layer2[1].running_var):
        with torch.no_grad():
            tensor.flatten()[-1].mul_(1.02)
        prints.add(ModelIdentity.of(segmenter).fingerprint)
    assert len(prints) == 3


def test_names_and_shapes_make_the_model_as_much_as_values():
    def identity(*names: str, shape: tuple[int, ...] = (4,)) -> str:
        model = nn.Module()
        for name in names:
            setattr(model, name, nn.Parameter(torch.ones(shape)))
        return ModelIdentity.of(model).fingerprint

    assert len({identity("a", "b"), identity("a", "c"), identity("a", "b", shape=(2, 2))}) == 3


def test_what_a_model_only_caches_is_no_part_of_it(segmenter):
    identity = ModelIdentity.of(segmenter)
    segmenter.register_buffer("grid", torch.zeros(3), persistent=False)
    assert ModelIdentity.of(segmenter) == identity


def test_a_profile_of_another_model_is_refused_and_both_are_named(segmenter, classifier, tmp_path):
    SourceProfile.collect(segmenter, stream(1, seed=1), layers="layer1").save(tmp_path / "p")
    with pytest.raises(
        ValueError, match=r"(?s)Segmenter \([\d,]+ param.*Classifier \([\d,]+ param"
    ):
        SourceProfile.load(tmp_path / "p", classifier)


def test_a_profile_of_other_weights_is_refused(segmenter):
    profile = SourceProfile.collect(segmenter, stream(1, seed=1), layers="layer1")
    with pytest.raises(ValueError, match="Same architecture, other weights"):
        profile.check(randomise(Segmenter(), seed=99))


def test_a_wider_model_is_refused(segmenter):
    profile = SourceProfile.collect(segmenter, stream(1, seed=1), layers="layer1")
    with pytest.raises(ValueError, match="another model"):
        profile.check(randomise(Segmenter(classes=7), seed=1))


# --- bad input ------------------------------------------------------------------------------


class Odd(nn.Module):
    """Returns a dict from one part, never runs another, runs a third twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Conv2d(3, 3, 1)
        self.never = nn.Conv2d(3, 3, 1)
        self.mapping = Returns()
        self.flat = nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.flat(self.mapping(self.twice(self.twice(x)))["x"])


class Returns(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x}


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (["never"], "'never' never ran"),
        (["twice"], "'twice' ran 2 times"),
        (["mapping"], "'mapping'.*no tensor but a dict"),
        (["flat"], r"token sequences \(B, N, C\).*\(1, 432\)"),
        (["tvice"], "no module named 'tvice' in Odd. Did you mean 'twice'"),
        ([""], "no module named ''"),
        ([], "no layers given"),
        (["twice", "twice"], "not different modules"),
    ],
)
def test_a_layer_that_cannot_host_bein_is_an_error_that_says_why(layers, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        SourceProfile.collect(Odd().eval(), stream(1, seed=1), layers=layers)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "none were given"),
        ([torch.randn(3, 8, 8)], r"shape \(3, 8, 8\).*unsqueeze"),
        ([torch.zeros(1, 3, 8, 8, dtype=torch.uint8)], "torch.uint8"),
        ([[[1.0]]], "not list"),
    ],
)
def test_images_that_are_none_are_an_error_that_says_why(segmenter, images, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        SourceProfile.collect(segmenter, images, layers="layer1")


def test_only_bad_images_make_no_profile(segmenter):
    bad = [torch.full((1, 3, 8, 8), float("inf"))]
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(ValueError, match="all of them gave NaN"),
    ):
        SourceProfile.collect(segmenter, bad, layers="layer1")


def test_a_model_in_training_mode_is_refused(segmenter):
    segmenter.layer2.train()
    with pytest.raises(ValueError, match=r"training mode.*layer2.*model.eval"):
        SourceProfile.collect(segmenter, stream(1, seed=1), layers="layer1")


def test_whole_maps_of_two_sizes_do_not_mix(segmenter):
    images = [*stream(1, seed=1, size=12), *stream(1, seed=1, size=16)]
    with pytest.raises(ValueError, match=r"(?s)one size.*\(6, 12, 12\).*\(6, 16, 16\)"):
        SourceProfile.collect(segmenter, images, layers="layer1", embedding="map")


def test_profiles_of_other_layers_or_models_do_not_merge(segmenter):
    images = stream(1, seed=1)
    first = SourceProfile.collect(segmenter, images, layers="layer1")
    with pytest.raises(ValueError, match="layer1 and layer2"):
        first.merge(SourceProfile.collect(segmenter, images, layers="layer2"))
    other = randomise(Segmenter(), seed=98)
    with pytest.raises(ValueError, match="two models"):
        first.merge(SourceProfile.collect(other, images, layers="layer1"))


def test_an_empty_profile_cannot_exist(profile):
    with pytest.raises(ValueError, match="an empty profile: 0 layers"):
        replace(profile, layers={})


def test_files_that_are_no_profile_are_refused(segmenter, profile, tmp_path):
    with pytest.raises(FileNotFoundError, match="no source profile at"):
        SourceProfile.load(tmp_path / "nothing")
    (tmp_path / "text").write_text("not a profile")
    with pytest.raises(ValueError, match="no source profile"):
        SourceProfile.load(tmp_path / "text")
    profile.save(tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-50])
    with pytest.raises(ValueError, match="no source profile"):
        SourceProfile.load(tmp_path / "cut")
    bestta.adapt(segmenter, profile).save(tmp_path / "state")
    with pytest.raises(ValueError, match="no source profile: it holds 'adapter state'"):
        SourceProfile.load(tmp_path / "state")


def test_a_damaged_profile_is_refused(profile, tmp_path):
    path = tmp_path / "profile"
    profile.save(path)
    tensors, about = load_tensors(path, "source profile")
    lacking = {k: v for k, v in tensors.items() if k != "layer1/mu"}
    for damaged in (
        (lacking, about),
        (tensors, {k: v for k, v in about.items() if k != "task"}),
        (tensors, {**about, "model": {"name": "?"}}),
    ):
        save_tensors(path, *damaged)
        with pytest.raises(ValueError, match="damaged source profile"):
            SourceProfile.load(path)
    save_tensors(path, tensors, {**about, "format": 99})
    with pytest.raises(ValueError, match="of format 99"):
        SourceProfile.load(path)


def test_a_setting_that_a_profile_should_not_have_is_named(segmenter, profile):
    profile = replace(profile, settings={"bestta": {"rhoo": 0.4}})
    with pytest.raises(ValueError, match=r"'rhoo'\. Did you mean 'rho'"):
        bestta.adapt(segmenter, profile)


@pytest.mark.parametrize("where", ["pathlib.Path.replace", "os.fsync"])
def test_an_interrupted_save_leaves_the_file_of_before(profile, tmp_path, monkeypatch, where):
    path = tmp_path / "profile.safetensors"
    profile.save(path)
    before = path.read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace(profile, images=99).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_small_and_holds_its_story_as_json(profile, tmp_path):
    path = tmp_path / "profile.safetensors"
    profile.save(path)
    assert path.stat().st_size < 5_000
    header_size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + header_size])
    story = json.loads(header["__metadata__"]["bestta"])
    assert story["images"] == 8
    assert story["model"]["architecture"] == "Segmenter"


def test_a_classifier_of_the_same_layer_names_does_not_take_the_profile(profile):
    with pytest.raises(ValueError, match="another model"):
        bestta.adapt(randomise(Classifier(), seed=2), profile)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ({"pixel_values": torch.rand(1, 3, 4, 4)}, "dict with keys 'pixel_values'"),
        ("images/", "readers for folders"),
        ([1.0], "torch.from_numpy"),
    ],
)
def test_what_is_no_image_is_told_what_would_be(image, words):
    with pytest.raises(ValueError, match=words):
        check_image(image)


class Overflowing(Segmenter):
    """Bright images have features like any other, and answers that are infinite."""

    def forward(self, image):
        bright = image.mean((1, 2, 3), keepdim=True) > 100
        return super().forward(image).masked_fill(bright, float("inf"))


def test_an_image_whose_answer_is_not_finite_is_left_out_of_all_of_the_profile():
    model = randomise(Overflowing(), seed=1)
    good = stream(4, seed=3)
    bright = good[0] + 1000
    assert bool(model.layer1(bright).isfinite().all())
    with pytest.warns(UserWarning, match="1 source images gave NaN or infinite values"):
        profile = SourceProfile.collect(model, [*good, bright], layers=["layer1"])
    expected = SourceProfile.collect(model, good, layers=["layer1"])
    assert torch.equal(profile.answers.histogram, expected.answers.histogram)
    assert torch.equal(profile.layers["layer1"].mu, expected.layers["layer1"].mu)


@pytest.mark.parametrize("layers", [3, [3], None, ["layer1", None]])
def test_layers_that_are_no_names_are_refused_with_what_was_seen(segmenter, layers):
    with pytest.raises(ValueError, match=r"layers are named as bestta\.layers\(model\) lists"):
        SourceProfile.collect(segmenter, stream(1, seed=3), layers=layers)
