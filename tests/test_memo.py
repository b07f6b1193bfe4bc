"""MEMO: its step against a plain transcription, AugMix's operations by hand and against Pillow."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn

import bestta
from bestta.adapters import memo
from nets import Classifier, Segmenter, TokenClassifier, randomise, snapshot, stream


def adapter_of(model: nn.Module, **settings):
    return bestta.adapt(model, method="memo", **settings)


class TwoLayers(nn.Module):
    """A convolution with a batch norm, and a linear layer: of pixels or of their mean."""

    def __init__(self, pixels: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.head, self.pixels = nn.Linear(5, 4), pixels

    def forward(self, image):
        features = self.norm(self.conv(image)).relu()
        if self.pixels:
            return self.head(features.movedim(1, -1)).movedim(-1, 1)
        return self.head(features.mean((2, 3)))


def mixed(model: TwoLayers, image: torch.Tensor) -> torch.Tensor:
    """The published forward: 16 parts source, one part of what is seen, which has no gradient."""
    features, norm = model.conv(image), model.norm
    with torch.no_grad():
        seen = features.transpose(0, 1).flatten(1)
        mean = (16 * norm.running_mean + seen.mean(1)) / 17
        variance = (16 * norm.running_var + seen.var(1, correction=0)) / 17
    features = (features - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + norm.eps).sqrt()
    features = (features * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)).relu()
    if model.pixels:
        return torch.einsum("bchw,kc->bkhw", features, model.head.weight) + model.head.bias.view(
            -1, 1, 1
        )
    return features.mean((2, 3)) @ model.head.weight.T + model.head.bias


def transcription(model, image, views, flipped, lr, chunk):
    """Step a copy in place on the marginal entropy; what it predicts then, and the entropy."""
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    probabilities = torch.cat([mixed(model, part) for part in views.split(chunk)]).softmax(1)
    if model.pixels:
        probabilities = torch.stack(
            [p.flip(-1) if f else p for p, f in zip(probabilities, flipped, strict=True)]
        )
    average = probabilities.mean(0)
    entropy = -(average * average.log()).sum(0).mean()
    entropy.backward()
    optimiser.step()
    with torch.no_grad():
        return mixed(model, image), entropy.item()


@pytest.mark.parametrize(("pixels", "chunk"), [(False, 32), (False, 5), (True, 8), (True, 1)])
def test_a_step_is_the_published_one(pixels, chunk, monkeypatch):
    model = randomise(TwoLayers(pixels), seed=4)
    image = stream(1, seed=7, size=6, shift=0.5)[0]
    count, lr = (8, 0.5) if pixels else (32, 0.005)
    views = torch.cat(stream(count, seed=8, size=6))
    flipped = torch.rand(count) < 0.5
    expected, entropy = transcription(model, image, views, flipped, lr, chunk)
    monkeypatch.setattr(memo, "views_of", lambda *settings: (views, flipped))
    # The step size of classification is the preset's: 0.005, as published.
    settings = {"lr": lr, "chunk": chunk} if pixels or chunk < 32 else {}
    adapter = adapter_of(model, **settings)
    logits = adapter(image)
    torch.testing.assert_close(logits, expected)
    assert not torch.allclose(logits, mixed(model, image), rtol=1e-4, atol=1e-4)
    assert adapter.last.losses["marginal_entropy"] == pytest.approx(entropy, rel=1e-5)
    assert adapter.last.adapted


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_chunks_do_not_change_a_model_without_batch_norms(chunk, autocast):
    # Under autocast there is more to go wrong: casts of weights are kept, with or without a graph.
    model = randomise(TokenClassifier(), seed=4)
    image = stream(1, seed=7)[0]
    whole, parts, still = (
        adapter_of(model, views=12, lr=lr, chunk=size)
        for lr, size in ((0.5, None), (0.5, chunk), (0.0, None))
    )
    close = {"rtol": 0.05, "atol": 0.02} if autocast else {}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = whole(image)
        torch.testing.assert_close(parts(image), expected, **close)
        assert (still(image) - expected).abs().max() > 0.1
    assert parts.last.losses["marginal_entropy"] == pytest.approx(
        whole.last.losses["marginal_entropy"], rel=0.01 if autocast else 1e-5
    )


def test_the_weights_are_the_sources_again_and_nothing_is_kept(classifier):
    adapter = adapter_of(classifier, views=3)
    before = snapshot(classifier)
    for image in stream(2, seed=7, batch=2):
        adapter(image)
    assert adapter.state() == {}
    assert adapter.trainable.keys() == dict(classifier.named_parameters()).keys()
    assert all(torch.equal(weight, before[name]) for name, weight in adapter.trainable.items())


def test_the_weights_are_the_sources_again_after_an_error(classifier, monkeypatch):
    adapter = adapter_of(classifier, views=3)
    step = adapter.optimiser.step

    def breaks(gradients):
        step(gradients)
        raise KeyboardInterrupt

    monkeypatch.setattr(adapter.optimiser, "step", breaks)
    with pytest.raises(KeyboardInterrupt):
        adapter(stream(1, seed=7)[0])
    named = dict(classifier.named_parameters())
    assert all(torch.equal(weight, named[name]) for name, weight in adapter.trainable.items())


@pytest.mark.parametrize("build", [Classifier, Segmenter, TokenClassifier])
def test_a_batch_is_its_images_one_after_the_other(build):
    model = randomise(build(), seed=4)
    batch = stream(1, seed=7, batch=3)[0]
    together, apart = adapter_of(model, views=4), adapter_of(model, views=4)
    expected = torch.cat([apart(image.unsqueeze(0)) for image in batch])
    assert torch.equal(together(batch), expected)


@pytest.mark.parametrize(
    ("build", "forwards"), [(Classifier, [32, 1]), (Segmenter, [1] * 8 + [1] * 8 + [1])]
)
def test_the_presets_views_are_32_at_once_or_8_one_by_one_twice(build, forwards, monkeypatch):
    adapter = adapter_of(randomise(build(), seed=4))
    seen: list[int] = []
    network = adapter.network

    def counted(image, weights):
        seen.append(len(image))
        return network(image, weights)

    monkeypatch.setattr(adapter, "network", counted)
    counted.source = network.source
    adapter(stream(1, seed=7)[0])
    assert seen == forwards


def test_images_do_not_know_of_each_other(classifier):
    # Without random numbers between them: the same seed, another image first.
    first, second = stream(2, seed=7)
    adapter = adapter_of(classifier, views=4)
    expected = adapter(second)
    adapter(first)
    adapter.generator.manual_seed(0)
    assert torch.equal(adapter(second), expected)


def test_views_that_move_are_refused_where_each_pixel_counts():
    adapter = adapter_of(randomise(Segmenter(), seed=4), geometric=True)
    with pytest.raises(ValueError, match=r"geometric=False.*preset='segmentation'"):
        adapter(stream(1, seed=7)[0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1.0}, r"lr must lie in \[0"),
        ({"views": 0}, "views must be a whole number from 1 on"),
        ({"chunk": 0}, "chunk must be a whole number from 1 on"),
        ({"prior": -1.0}, "prior must lie in"),
        ({"prior": float("nan")}, "prior must lie in"),
        ({"normalise": ((0.5,),)}, "normalise is None, or the means"),
    ],
)
def test_a_setting_that_makes_no_sense_is_an_error_that_says_so(classifier, settings, words):
    with pytest.raises(ValueError, match=words):
        adapter_of(classifier, **settings)


def test_a_prior_of_infinity_is_the_sources_statistics(classifier):
    adapter = adapter_of(classifier, views=2, lr=0.0, prior=float("inf"))
    image = stream(1, seed=7)[0]
    torch.testing.assert_close(adapter(image), classifier(image))


def test_a_stream_stopped_between_images_goes_on_with_the_same_views(classifier, tmp_path):
    images = stream(4, seed=7)
    whole, first, second = (adapter_of(classifier, views=3, seed=seed) for seed in (5, 5, 0))
    predictions = [whole(image) for image in images]
    for image in images[:2]:
        first(image)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    assert all(torch.equal(second(x), y) for x, y in zip(images[2:], predictions[2:], strict=True))


# --- views ------------------------------------------------------------------------------------


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_views_lie_in_the_range_of_pixels():
    mean, deviation = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    pixels = torch.rand(3, 16, 24)
    columns = [torch.tensor(values).view(3, 1, 1) for values in (mean, deviation)]
    image = (pixels - columns[0]) / columns[1]
    views, flipped = memo.views_of(image, 20, generator(), True, (mean, deviation))
    assert views.shape == (20, 3, 16, 24)
    assert 0 < int(flipped.sum()) < 20
    back = views * columns[1] + columns[0]
    assert back.min() > -1e-5
    assert back.max() < 1 + 1e-5
    own, _ = memo.views_of(image, 20, generator(), True)
    assert own.min() >= image.min() - 1e-5
    assert own.max() <= image.max() + 1e-5


def test_normalise_of_other_channels_is_refused():
    with pytest.raises(ValueError, match="normalise has 2 channels, and the image is"):
        memo.views_of(torch.rand(3, 8, 8), 1, generator(), True, ((0.5, 0.5), (0.2, 0.2)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_views_have_the_type_of_the_image_and_leave_it_alone(dtype):
    image = torch.rand(3, 8, 8).to(dtype)
    before = image.clone()
    assert memo.views_of(image, 3, generator(), True)[0].dtype == dtype
    assert torch.equal(image, before)


def test_a_constant_image_has_constant_views_of_colours():
    views, _ = memo.views_of(torch.full((3, 8, 8), 0.7), 5, generator(), False)
    torch.testing.assert_close(views, torch.full((5, 3, 8, 8), 0.7))


def test_views_of_colours_do_not_move_a_pixel(monkeypatch):
    # With no operation but the identity, a view is the image, or the image flipped.
    monkeypatch.setattr(memo, "COLOURS", [lambda image, strength, sign: image])
    image = torch.randint(256, (3, 6, 8)) / 255
    views, flipped = memo.views_of(image, 10, generator(), False, ((0.0,), (1.0,)))
    for view, flip in zip(views, flipped, strict=True):
        torch.testing.assert_close(view.flip(-1) if flip else view, image)


def test_the_weights_of_the_mixture_sum_to_one(monkeypatch):
    # If every chain ends in white, a view is the image faded to white by one factor.
    monkeypatch.setattr(memo, "COLOURS", [lambda image, *_: torch.full_like(image, 255)])
    image = torch.tensor([0.0, 100.0, 255.0]).view(1, 1, 3)
    factors = []
    for seed in range(20):
        black, grey, white = memo.augmix(image, generator(seed), geometric=False).flatten()
        assert white.item() == pytest.approx(255)
        assert (255 - grey).item() == pytest.approx((255 - black).item() * 155 / 255, rel=1e-4)
        factors.append(1 - black.item() / 255)
    assert min(factors) < 0.2 < 0.8 < max(factors)


def test_three_chains_of_one_to_three_mild_operations(monkeypatch):
    calls: list[tuple[float, int]] = []

    def note(image, strength, sign):
        assert torch.equal(image, image.round())  # as the bytes of a file
        calls.append((strength, sign))
        return image

    monkeypatch.setattr(memo, "COLOURS", [note])
    lengths = set()
    for seed in range(200):
        before = len(calls)
        memo.augmix(torch.full((1, 2, 2), 7.3), generator(seed), geometric=False)
        lengths.add(len(calls) - before)
    assert lengths == set(range(3, 10))
    # Severity 1 on a scale of 10, drawn from 0.1 on.
    strengths = [strength for strength, _ in calls]
    assert 0.01 <= min(strengths) < 0.012
    assert 0.098 < max(strengths) < 0.1
    assert {sign for _, sign in calls} == {1, -1}


def test_a_crop_is_the_image_moved_by_an_eighth_at_most_with_black_around():
    image = torch.full((1, 16, 24), 9.0)
    image[0, 8, 12] = 200.0
    places = set()
    for seed in range(300):
        crop = memo.random_crop(image, generator(seed))
        assert crop.shape == image.shape
        (down, right), *_ = (crop[0] == 200).nonzero().tolist()
        places.add((down - 8, right - 12))
        rows = slice(max(0, down - 8), 16 + min(0, down - 8))
        columns = slice(max(0, right - 12), 24 + min(0, right - 12))
        assert bool((crop[0, rows, columns] > 0).all())
        black = 16 * 24 - (16 - abs(down - 8)) * (24 - abs(right - 12))
        assert int((crop == 0).sum()) == black
    assert places == {(down, right) for down in range(-2, 3) for right in range(-3, 4)}


# --- operations, by hand ----------------------------------------------------------------------


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1)


def test_posterise_keeps_the_highest_bits():
    image = row(0, 15, 16, 37, 255)
    assert memo.posterise(image, 0.09).flatten().tolist() == [0, 0, 16, 32, 240]  # four bits
    assert memo.posterise(image, 0.25).flatten().tolist() == [0, 0, 0, 32, 224]  # three


def test_solarise_inverts_from_the_threshold_on():
    # int(0.25 · 256) = 64, so from 256 − 64 = 192 on.
    assert memo.solarise(row(0, 191, 192, 255), 0.25).flatten().tolist() == [0, 191, 63, 0]


def test_autocontrast_stretches_each_channel_to_the_whole_range():
    image = torch.stack([row(10, 20, 40)[0], row(7, 7, 7)[0]])
    # By hand: (20 − 10) · 255 / 30 = 85; a constant channel has nothing to stretch.
    assert memo.autocontrast(image)[:, 0].tolist() == [[0, 85, 255], [7, 7, 7]]


def test_equalise_spreads_four_values_evenly():
    # 255 pixels each of 10, 20, 30, 200. A step is (1020 − 255) // 255 = 3 pixels, of which half,
    # 1, is added before dividing: 1 // 3 = 0, 256 // 3 = 85, 511 // 3 = 170, 766 // 3 = 255.
    values = torch.tensor([10.0, 20.0, 30.0, 200.0])
    image = values.repeat(255).view(1, 30, 34)
    expected = torch.tensor([0.0, 85.0, 170.0, 255.0]).repeat(255).view(1, 30, 34)
    assert torch.equal(memo.equalise(image), expected)
    assert torch.equal(memo.equalise(image[:, :4]), image[:, :4])  # fewer than 255: left alone


def test_translations_move_by_whole_pixels_and_leave_grey():
    # int(0.4 · 6 / 3) = 0 pixels, int(0.5 · 6 / 3) = 1, int(1 · 6 / 3) = 2.
    image = row(1, 2, 3, 4, 5, 6)
    assert torch.equal(memo.translate_x(image, 0.4, 1), image)
    assert memo.translate_x(image, 0.5, 1).flatten().tolist() == [2, 3, 4, 5, 6, 128]
    assert memo.translate_x(image, 1.0, -1).flatten().tolist() == [128, 128, 1, 2, 3, 4]
    assert memo.translate_y(image.mT, 1.0, -1).flatten().tolist() == [128, 128, 1, 2, 3, 4]


def test_shears_shift_rows_by_how_far_down_they_are():
    # At full strength 0.3: the centre of the first row is ½ down, so it is shifted by 0.15 of a
    # pixel: 0.85 · 0 + 0.15 · 100 = 15, …, 0.85 · 200 + 0.15 · 128 = 189.2. The second by 0.45: 45,
    # 145, 0.55 · 200 + 0.45 · 128 = 167.6. In whole numbers.
    image = row(0, 100, 200).expand(1, 2, 3)
    expected = torch.tensor([[[15.0, 115.0, 189.0], [45.0, 145.0, 168.0]]])
    torch.testing.assert_close(memo.shear_x(image, 1.0, 1), expected)
    torch.testing.assert_close(memo.shear_y(image.mT, 1.0, 1), expected.mT)


def test_a_warp_by_whole_pixels_is_exact():
    image = torch.arange(9.0).view(1, 3, 3)
    # Row r moved left by r: x + y − ½, as y is counted at the middle of a row.
    moved = memo.warp(image, ((1, 1, -0.5), (0, 1, 0)))
    assert moved[0].tolist() == [[0, 1, 2], [4, 5, 128], [8, 128, 128]]


def pillow(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image.byte().movedim(0, -1).numpy())


def back(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).movedim(-1, 0).float()


@pytest.fixture
def photo() -> torch.Tensor:
    """Soft shapes in bytes, (3, 40, 48), so that a bilinear sample has a meaning."""
    y, x = torch.meshgrid(torch.linspace(0, 5, 40), torch.linspace(0, 6, 48), indexing="ij")
    waves = [torch.sin(x + k) * torch.cos(y * (1 + k / 3)) for k in range(3)]
    return ((torch.stack(waves) * 0.4 + 0.5) * 255).round()


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance"),
    [
        (memo.equalise, ImageOps.equalize, 0),
        (memo.autocontrast, ImageOps.autocontrast, 1),  # Pillow rounds a quotient of its own
        (lambda x: memo.posterise(x, 0.05), lambda x: ImageOps.posterize(x, 4), 0),
        (lambda x: memo.solarise(x, 0.1), lambda x: ImageOps.solarize(x, 231), 0),
    ],
)
def test_colours_are_changed_as_pillow_does(photo, ours, theirs, tolerance):
    assert (ours(photo) - back(theirs(pillow(photo)))).abs().max() <= tolerance


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: memo.rotate(x, 0.1, 1), lambda x: x.rotate(3, Image.Resampling.BILINEAR)),
        (lambda x: memo.rotate(x, 0.1, -1), lambda x: x.rotate(-3, Image.Resampling.BILINEAR)),
        (lambda x: memo.shear_x(x, 0.1, 1), lambda x: moved_by_pillow(x, (1, 0.03, 0, 0, 1, 0))),
        (lambda x: memo.shear_y(x, 0.1, -1), lambda x: moved_by_pillow(x, (1, 0, 0, -0.03, 1, 0))),
        (lambda x: memo.translate_x(x, 0.1, 1), lambda x: moved_by_pillow(x, (1, 0, 1, 0, 1, 0))),
        (lambda x: memo.translate_y(x, 0.1, 1), lambda x: moved_by_pillow(x, (1, 0, 0, 0, 1, 1))),
    ],
)
def test_shapes_are_moved_as_pillow_does_away_from_the_border(photo, ours, theirs):
    difference = (ours(photo) - back(theirs(pillow(photo)))).abs()
    assert difference[:, 4:-4, 4:-4].max() <= 1


def moved_by_pillow(image: Image.Image, numbers: tuple[float, ...]) -> Image.Image:
    return image.transform(
        image.size, Image.Transform.AFFINE, numbers, resample=Image.Resampling.BILINEAR
    )


def test_the_centre_stays_where_an_image_is_turned(photo):
    odd = photo[:, :39, :47]
    turned = memo.rotate(odd, 1.0, 1)
    assert torch.equal(turned[:, 19, 23], odd[:, 19, 23])
    # 30° of a 47 × 39 image leave its corners bare.
    assert turned[:, 0, 0].tolist() == [128, 128, 128]
    assert math.isclose(memo.rotate(odd, 0.03, 1).sub(odd).abs().max(), 0)  # less than a degree
