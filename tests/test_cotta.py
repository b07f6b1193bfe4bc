"""CoTTA against its published update rule, written out on copies of a small network."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestta
from bestta.adapters import cotta as module_under_test
from bestta.adapters.augment import augment
from nets import Classifier, Segmenter, randomise, same, stream

FOG = {"shift": 1.5, "scale": 0.4}


class Images(nn.Module):
    """A convolution, a batch norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.fc = nn.Linear(5, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(image)).relu().mean((2, 3)))


class Maps(nn.Module):
    """Two convolutions and a batch norm; logits of the image's size, or of half of it."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1, stride=stride)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Conv2d(5, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(image)).relu())


def copies(model: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    student, teacher, anchor = (copy.deepcopy(model).requires_grad_(False) for _ in range(3))
    return student.requires_grad_(True), teacher, anchor


@torch.no_grad()
def follow_and_forget(student, teacher, anchor, draw, probability=0.01) -> None:
    """teacher ← 0.999 teacher + 0.001 student; then each number to the source with p = 0.01."""
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.copy_(0.999 * slow + 0.001 * fast)
    for weight, source in zip(student.parameters(), anchor.parameters(), strict=True):
        mask = (torch.rand(weight.shape, generator=draw) < probability).float()
        weight.copy_(source * mask + weight * (1 - mask))


def cotta_for_images(model: nn.Module, images: list[Tensor], seed: int = 0, count: int = 32):
    """The published rule, in place: batch norms in training mode, without running statistics."""
    student, teacher, anchor = copies(model)
    for net in (student, teacher, anchor):
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.train()
                norm.track_running_stats = False
                norm.running_mean = norm.running_var = None
    adam = torch.optim.Adam(student.parameters(), lr=1e-3, betas=(0.9, 0.999))
    draw, answers = torch.Generator().manual_seed(seed), []
    for image in images:
        outputs = student(image)
        confidence = anchor(image).softmax(1).max(1).values.mean()
        if confidence < 0.92:
            target = torch.stack([teacher(augment(image, draw)) for _ in range(count)]).mean(0)
        else:
            target = teacher(image)
        loss = -(target.softmax(1) * outputs.log_softmax(1)).sum(1).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        follow_and_forget(student, teacher, anchor, draw)
        answers.append(target)
    return answers, student, teacher


def cotta_for_maps(model: nn.Module, images: list[Tensor], seed: int = 0):
    """The published rule for ACDC: eval mode, fourteen views, decided per pixel, hard labels."""
    student, teacher, anchor = copies(model)
    adam = torch.optim.Adam(student.parameters(), lr=7.5e-6, betas=(0.9, 0.999))
    draw, answers = torch.Generator().manual_seed(seed), []
    for image in images:
        logits = student(image)
        size = logits.shape[-2:]
        probabilities = []
        for scale in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0):
            sides = [int(scale * side) for side in image.shape[-2:]]
            view = F.interpolate(image, sides, mode="bilinear")
            upright = F.interpolate(teacher(view), size, mode="bilinear")
            mirrored = F.interpolate(teacher(view.flip(-1)), size, mode="bilinear").flip(-1)
            probabilities += [upright.softmax(1), mirrored.softmax(1)]
        average = torch.stack(probabilities).mean(0)
        single = teacher(image).softmax(1)
        sure = anchor(image).softmax(1).max(1, keepdim=True).values > 0.69
        merged = torch.where(sure, single, average)
        loss = F.cross_entropy(logits, merged.argmax(1))
        adam.zero_grad()
        loss.backward()
        adam.step()
        follow_and_forget(student, teacher, anchor, draw)
        answers.append(merged)
    return answers, student, teacher


def check_weights(adapter, student: nn.Module, teacher: nn.Module) -> None:
    # Adam divides by the size of the gradient, so rounding shows where a gradient is all but zero.
    for name, weight in student.named_parameters():
        torch.testing.assert_close(adapter.student[name], weight, rtol=1e-4, atol=2e-5)
    for name, weight in teacher.named_parameters():
        torch.testing.assert_close(adapter.teacher[name], weight, rtol=1e-5, atol=1e-7)


def calls(adapter) -> list[tuple[int, ...]]:
    """The shapes of the images that the network is asked about from now on."""
    shapes: list[tuple[int, ...]] = []
    adapter.network.module.register_forward_pre_hook(
        lambda module, inputs: shapes.append(tuple(inputs[0].shape))
    )
    return shapes


def darker(image: Tensor, draw=None, normalise=None) -> Tensor:
    """A view that draws nothing."""
    return image * 0.5 - torch.linspace(0, 1, image.shape[-1])


def sharpened(model: nn.Module, factor: float) -> nn.Module:
    """The same with logits times ``factor``: as sure as one likes."""
    last = list(model.children())[-1]
    with torch.no_grad():
        last.weight.mul_(factor)
        last.bias.mul_(factor)
    return model


# --- classification -----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
def test_three_steps_of_classification_are_the_published_ones(batch):
    model = randomise(Images().double(), seed=2)
    images = [image.double() for image in stream(3, seed=7, batch=batch, size=8, **FOG)]
    expected, student, teacher = cotta_for_images(model, images)
    adapter = bestta.adapt(model, method="cotta")
    for image, answer in zip(images, expected, strict=True):
        torch.testing.assert_close(adapter(image), answer, rtol=1e-5, atol=1e-6)
        assert adapter.last.adapted
    check_weights(adapter, student, teacher)


def test_a_sure_anchor_makes_one_plain_pass_of_the_teacher_the_target():
    # So sharp that the anchor is unsure of the first batch (0.917), and sure of the others (0.923
    # and more).
    model = sharpened(randomise(Images().double(), seed=2), 11.3)
    images = [image.double() for image in stream(4, seed=7, batch=2, size=8, **FOG)]
    expected, student, teacher = cotta_for_images(model, images)
    adapter = bestta.adapt(model, method="cotta")
    shapes, counts = calls(adapter), []
    for image, answer in zip(images, expected, strict=True):
        torch.testing.assert_close(adapter(image), answer, rtol=1e-5, atol=1e-6)
        counts.append(len(shapes))
        shapes.clear()
    assert counts == [34, 3, 3, 3]  # anchor, student, and the teacher 32 times or once
    check_weights(adapter, student, teacher)


def test_an_unsure_anchor_has_the_teacher_asked_about_32_views():
    adapter = bestta.adapt(randomise(Images(), seed=2), method="cotta")
    shapes = calls(adapter)
    adapter(stream(1, seed=7, batch=4)[0])
    assert len(shapes) == 32 + 2  # and anchor and student


@pytest.mark.parametrize("prior", [0.0, 4.0, float("inf")])
def test_views_of_one_image_that_go_together_are_answered_as_if_each_came_alone(prior, monkeypatch):
    model = randomise(Images().double(), seed=2)
    images = [image.double() for image in stream(3, seed=7, size=8, **FOG)]
    settings = {"method": "cotta", "augmentations": 5, "prior": prior}
    together, apart = (bestta.adapt(model, **settings) for _ in range(2))
    shapes = calls(together)
    answers = [together(image) for image in images]
    # The first time both ways are compared: anchor, together, each alone, student.
    assert [shape[0] for shape in shapes] == [1, 5, *[1] * 5, 1, *[1, 5, 1] * 2]
    monkeypatch.setattr(module_under_test, "PIXELS_AT_ONCE", 1)
    shapes = calls(apart)
    for image, answer in zip(images, answers, strict=True):
        torch.testing.assert_close(apart(image), answer)
    assert [shape[0] for shape in shapes] == [1] * 7 * 3


class Tokens(Images):
    """Normalises the pixels of all images as so many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.conv(image).flatten(2).mT
        normal = self.norm(tokens.flatten(0, 1)).view_as(tokens)
        return self.fc(normal.relu().mean(1))


class Inline(Images):
    """Normalises by the batch itself, without a module that says so."""

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(
            F.batch_norm(self.conv(image), None, None, training=True).relu().mean((2, 3))
        )


class OneImage(Images):
    """Written for one image."""

    def forward(self, image: Tensor) -> Tensor:
        pooled = self.norm(self.conv(image)).relu().mean((2, 3))
        return self.fc(pooled.reshape(1, 5))


@pytest.mark.parametrize("net", [Tokens, Inline, OneImage])
@pytest.mark.parametrize("prior", [0.0, 4.0])
def test_a_network_that_cannot_tell_images_apart_is_shown_one_view_after_another(
    net, prior, monkeypatch
):
    model = randomise(net().double(), seed=2)
    images = [image.double() for image in stream(3, seed=7, size=8, **FOG)]
    settings = {"method": "cotta", "augmentations": 5, "prior": prior}
    tried, apart = (bestta.adapt(model, **settings) for _ in range(2))
    answers = [tried(image) for image in images]
    monkeypatch.setattr(module_under_test, "PIXELS_AT_ONCE", 1)
    for image, answer in zip(images, answers, strict=True):
        assert torch.equal(apart(image), answer)
    assert tried.together is False


def test_views_of_a_large_image_are_drawn_and_asked_about_one_after_another(monkeypatch):
    waiting, most = [], []
    usual = module_under_test.augment

    def spy(image, draw, normalise=None):
        waiting.append(image.shape)
        most.append(len(waiting))
        return usual(image, draw, normalise)

    monkeypatch.setattr(module_under_test, "augment", spy)
    adapter = bestta.adapt(randomise(Images(), seed=2), method="cotta", augmentations=3)
    adapter.network.module.register_forward_pre_hook(lambda module, inputs: waiting.clear())
    adapter(stream(1, seed=7, size=300)[0])
    assert most == [1, 1, 1]
    most.clear()
    adapter(stream(1, seed=7, size=170)[0])  # 28,900 pixels: two of them at once
    assert most == [1, 2, 1]


class Sure(nn.Module):
    """Two classes, of which the first has the probability that the image says."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, image: Tensor) -> Tensor:
        p = image[:, :1]
        logit = (p / (1 - p)).log() * self.scale
        both = torch.cat([logit, torch.zeros_like(logit)], 1)
        return both if image.shape[-1] > 1 else both.flatten(1)


def of_probabilities(*values: float) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 3, 1, 1).clone()


@pytest.mark.parametrize(
    ("probabilities", "asked"),
    [
        ((0.99, 0.86), 3),  # 0.925 on average
        ((0.99, 0.84), 34),  # 0.915
        ((0.93,), 3),
        ((0.91,), 34),
    ],
)
def test_the_batchs_mean_top_probability_decides_at_092(probabilities, asked):
    adapter = bestta.adapt(Sure().eval(), method="cotta", preset="classification")
    shapes = calls(adapter)
    adapter(of_probabilities(*probabilities))
    # Views of a single image go through together as well, the first time.
    together = 32 if len(probabilities) == 1 and asked > 3 else 0
    assert sum(shape[0] for shape in shapes) == asked * len(probabilities) + together


def test_the_prediction_is_the_teachers_and_not_the_students(monkeypatch):
    monkeypatch.setattr(module_under_test, "augment", darker)
    adapter = bestta.adapt(randomise(Images(), seed=2), method="cotta", lr=0.1)
    image = stream(1, seed=7, batch=4, **FOG)[0]
    adapter(image)
    with torch.no_grad():
        teacher = adapter.network(darker(image), adapter.teacher)
        student = adapter.network(darker(image), adapter.student)
    torch.testing.assert_close(adapter(image), teacher)
    assert not torch.allclose(student, teacher, rtol=0.01, atol=0.01)


def test_the_views_are_of_pixels_where_the_normalisation_is_known(monkeypatch):
    seen = []

    def spy(image, draw, normalise=None):
        seen.append(normalise)
        return image

    monkeypatch.setattr(module_under_test, "augment", spy)
    normalise = ((0.4, 0.5, 0.6), (0.2, 0.2, 0.3))
    adapter = bestta.adapt(
        randomise(Images(), seed=2), method="cotta", augmentations=3, normalise=normalise
    )
    adapter(stream(1, seed=7)[0])
    assert seen == [normalise] * 3


# --- segmentation -------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "factor"), [(1, 1), (2, 1), (1, 2), (1, 0.1)])
def test_three_steps_of_segmentation_are_the_published_ones(stride, factor):
    # 64 pixels: half of that is the smallest side, so that every size is a plain multiple.
    model = sharpened(randomise(Maps(stride).double(), seed=2), factor)
    images = [image.double() for image in stream(3, seed=7, size=64, **FOG)]
    expected, student, teacher = cotta_for_maps(model, images)
    adapter = bestta.adapt(model, method="cotta")
    for image, answer in zip(images, expected, strict=True):
        torch.testing.assert_close(adapter(image).exp(), answer)
    check_weights(adapter, student, teacher)


def test_fourteen_views_are_asked_where_a_pixel_is_unsure_and_one_where_none_is():
    image = torch.full((1, 3, 64, 96), 0.8)
    adapter = bestta.adapt(Sure().eval(), method="cotta", preset="segmentation")
    shapes = calls(adapter)
    adapter(image)
    assert len(shapes) == 3  # anchor, teacher, student
    shapes.clear()
    image[0, 0, 5, 5] = 0.6
    adapter(image)
    assert len(shapes) == 2 + 14
    assert [shape[2:] for shape in shapes[2:-1]] == [
        *[(32, 48)] * 2,
        *[(48, 72)] * 2,
        (64, 96),  # flipped; as it is, it was asked before
        *[(80, 120)] * 2,
        *[(96, 144)] * 2,
        *[(112, 168)] * 2,
        *[(128, 192)] * 2,
    ]


@pytest.mark.parametrize("probability", [0.70, 0.68])
def test_each_pixels_own_top_probability_decides_at_069(probability):
    # One pixel is like no other: its average over sizes differs from the plain answer.
    image = torch.full((1, 3, 32, 32), 0.9)
    image[0, 0, 9, 9] = probability
    adapter = bestta.adapt(Sure().eval(), method="cotta", preset="segmentation")
    answer = adapter(image).exp()[0, 0]
    assert answer[0, 0].item() == pytest.approx(0.9)
    kept = answer[9, 9].item() == pytest.approx(probability)
    assert kept == (probability > 0.69)


def test_small_images_are_not_made_smaller():
    adapter = bestta.adapt(Sure().eval(), method="cotta", preset="segmentation")
    shapes = calls(adapter)
    adapter(torch.full((1, 3, 40, 12), 0.6))
    assert min(height for _, _, height, _ in shapes) == 32
    assert min(width for _, _, _, width in shapes) == 12


def test_a_probability_of_zero_has_a_finite_log():
    model = sharpened(randomise(Maps(), seed=2), 1e4)
    adapter = bestta.adapt(model, method="cotta")
    assert bool(adapter(stream(1, seed=7)[0]).isfinite().all())
    assert adapter.last.adapted


# --- teacher, memory, form ----------------------------------------------------------------------


def test_each_number_goes_back_to_the_source_with_the_probability_said(monkeypatch):
    # No view draws, so the first numbers drawn are those of the restoring, weight after weight.
    monkeypatch.setattr(module_under_test, "augment", darker)
    model = randomise(Classifier(), seed=11)
    adapter = bestta.adapt(model, method="cotta", restore_probability=0.3, seed=4)
    free = bestta.adapt(model, method="cotta", restore_probability=0.0)
    image = stream(1, seed=7, batch=4)[0]
    adapter(image)
    free(image)
    draw, restored, moved, count = torch.Generator().manual_seed(4), 0, 0, 0
    for name, source in model.named_parameters():
        mask = torch.rand(source.shape, generator=draw) < 0.3
        weight, learned = adapter.student[name], free.student[name]
        assert torch.equal(weight, torch.where(mask, source, learned))
        moved += int((learned != source).sum())
        restored, count = restored + int(mask.sum()), count + mask.numel()
    assert moved > 0.9 * count
    assert 0.24 < restored / count < 0.36  # 0.3 ± 0.018
    # The teacher had followed before.
    assert same(adapter.teacher, free.teacher)


def test_the_teacher_takes_a_thousandth_of_the_student(monkeypatch):
    # By hand: a start of w and a student at w + d leave the teacher at w + d / 1000.
    monkeypatch.setattr(module_under_test, "augment", darker)
    model = randomise(Images().double(), seed=2)
    adapter = bestta.adapt(model, method="cotta", lr=0.5, restore_probability=0.0)
    adapter(stream(1, seed=7, batch=4)[0].double())
    moved = {name: adapter.student[name].detach() - w for name, w in model.named_parameters()}
    assert max(float(distance.abs().max()) for distance in moved.values()) > 0.1
    for name, source in model.named_parameters():
        torch.testing.assert_close(adapter.teacher[name], source + moved[name] / 1000)


@pytest.mark.parametrize(
    ("net", "factor"),
    [(Classifier, 1), (Classifier, 100), (Segmenter, 0.1), (Segmenter, 1), (Segmenter, 100)],
)
def test_the_published_form_costs_more_and_changes_nothing(net, factor):
    model = sharpened(randomise(net(), seed=11), factor)
    lean, published = (
        bestta.adapt(model, method="cotta", form=form, augmentations=3)
        for form in ("lean", "published")
    )
    few, many = calls(lean), calls(published)
    for image in stream(4, seed=7, batch=2, **FOG):
        assert torch.equal(lean(image), published(image))
    assert same(lean.state(), published.state())
    assert torch.equal(lean.generator.get_state(), published.generator.get_state())
    # Anchor, teacher, student and all views; in segmentation the views of the anchor as well.
    assert len(many) == 4 * (3 + 3 if net is Classifier else 3 + 13 + 13)
    assert len(few) < len(many)


def test_a_domain_change_forgets_the_optimiser_alone_and_only_if_asked():
    model = randomise(Images(), seed=2)
    images = stream(3, seed=7, batch=2)
    usual = bestta.adapt(model, method="cotta", augmentations=2)
    assert not usual.needs_domain_changes
    told = bestta.adapt(model, method="cotta", augmentations=2, rebuild_optimiser=True)
    assert told.needs_domain_changes
    for image in images:
        usual(image)
        told(image)
    before = usual.state()
    usual.domain_changed()
    told.domain_changed()
    assert same(before, usual.state())
    for name, tensor in told.state().items():
        if name.startswith("optimiser/"):
            assert not tensor.any()
        else:
            assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    ("net", "views", "right"), [(Classifier, "scales", "augment"), (Segmenter, "augment", "scales")]
)
def test_views_of_the_other_task_are_refused(net, views, right):
    adapter = bestta.adapt(randomise(net(), seed=11), method="cotta", views=views)
    before = adapter.state()
    with pytest.raises(ValueError, match=f"views='{views}'.*views='{right}'"):
        adapter(stream(1, seed=7)[0])
    assert same(before, adapter.state())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1}, "lr must lie in"),
        ({"beta1": 1.0}, "beta1 must lie in"),
        ({"teacher_decay": 1.1}, r"teacher_decay must lie in \[0, 1\]"),
        ({"restore_probability": -0.1}, r"restore_probability must lie in \[0, 1\]"),
        ({"confidence": float("nan")}, "confidence must lie in"),
        ({"views": "crops"}, "views is one of 'augment', 'scales'"),
        ({"form": "fast"}, "form is one of 'lean', 'published'"),
        ({"augmentations": 0}, "augmentations must be a whole number"),
        ({"scales": ()}, "scales are numbers above 0"),
        ({"scales": (1.0, 0.0)}, "scales are numbers above 0"),
        ({"prior": -1.0}, "prior must lie in"),
        ({"normalise": ((0.5,), (0.0,))}, "means and the deviations"),
    ],
)
def test_settings_without_sense_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        bestta.adapt(randomise(Images(), seed=2), method="cotta", **settings)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="AvgPool2d has none"):
        bestta.adapt(nn.AvgPool2d(2).eval(), method="cotta", preset="segmentation")


def test_a_model_of_one_size_is_told_how_to_keep_to_it():
    class Fixed(Segmenter):
        def forward(self, image: Tensor) -> Tensor:
            return super().forward(image) + self.head.weight.new_zeros(12, 12)

    model = randomise(Fixed(), seed=1)
    image = stream(1, seed=2)[0]
    settings = {"method": "cotta", "preset": "segmentation", "confidence": 1.0}
    with pytest.raises(ValueError, match=r"a view of \(\d+, \d+\) .*scales=\(1.0,\)"):
        bestta.adapt(model, **settings)(image)
    adapter = bestta.adapt(model, scales=(1.0,), **settings)
    assert adapter(image).shape == (1, 5, 12, 12)
    assert adapter.last.adapted


@pytest.mark.parametrize(
    "settings",
    [
        {"scales": 1.0},
        {"scales": ("a",)},
        {"scales": ()},
        {"rebuild_optimiser": "yes"},
        {"seed": "a"},
    ],
)
def test_what_is_no_setting_is_named(settings):
    ((name, _),) = settings.items()
    with pytest.raises(ValueError, match=f"^{name}"):
        bestta.adapt(randomise(Classifier(), seed=1), method="cotta", **settings)


@pytest.mark.parametrize("net", [Classifier, Segmenter])
def test_logits_of_one_channel_are_refused_for_a_softmax_makes_them_all_alike(net):
    adapter = bestta.adapt(randomise(net(1), seed=1), method="cotta")
    with pytest.raises(ValueError, match=r"compares classes, and the logits .* are of one"):
        adapter(stream(1, seed=2)[0])
