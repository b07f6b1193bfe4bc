"""The scores against slow loops over pixels, and by hand."""

from __future__ import annotations

import doctest
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bestta.metrics import Errors, MeanIoU, Metric, metric_for, scores


def logits_for(predicted, classes):
    """Logits (B, K, ...) whose largest is at the classes (B, ...), none of them by a tie."""
    planes = torch.nn.functional.one_hot(torch.as_tensor(predicted), classes).movedim(-1, 1)
    return planes.float() * 3 - 1


def row(*ids):
    """One image of one row."""
    return torch.tensor([[list(ids)]])


def counted(predicted, labels, classes):
    metric = MeanIoU(classes)
    metric.add(logits_for(predicted, classes), labels)
    return metric


def slow_ious(predicted, labels, classes):
    """Intersection over union by its definition, class by class and pixel by pixel."""
    pixels = [
        (truth, guess)
        for truth, guess in zip(
            labels.flatten().tolist(), predicted.flatten().tolist(), strict=True
        )
        if truth != 255
    ]
    ious = []
    for c in range(classes):
        both = sum(1 for truth, guess in pixels if truth == c and guess == c)
        either = sum(1 for truth, guess in pixels if truth == c or guess == c)
        ious.append(100 * both / either if either else None)
    return ious


batches = st.tuples(
    st.integers(0, 2**31),  # seed
    st.integers(1, 6),  # classes
    st.integers(1, 3),  # images
    st.integers(1, 5),  # height
    st.integers(1, 5),  # width
    st.integers(1, 4),  # batches
)


def drawn(seed, classes, images, height, width, number):
    """Logits with all values different, and labels among which some are ignored."""
    dice = torch.Generator().manual_seed(seed)
    for _ in range(number):
        logits = torch.randn(images, classes, height, width, generator=dice)
        labels = torch.randint(classes, (images, height, width), generator=dice)
        labels[torch.rand(images, height, width, generator=dice) < 0.2] = 255
        yield logits, labels


# Mean IoU


@given(batches)
def test_mean_iou_is_that_of_a_loop_over_all_pixels_of_all_batches(case):
    classes = case[1]
    metric = MeanIoU(classes)
    guesses, truths = [], []
    for logits, labels in drawn(*case):
        metric.add(logits, labels)
        values = logits.movedim(1, -1).reshape(-1, classes).tolist()
        guesses += [max(range(classes), key=pixel.__getitem__) for pixel in values]
        truths += labels.flatten().tolist()
    ious = slow_ious(torch.tensor(guesses), torch.tensor(truths), classes)
    seen = [iou for iou in ious if iou is not None]
    assert metric.per_class() == pytest.approx(ious)
    expected = sum(seen) / len(seen) if seen else math.nan
    assert metric.score() == pytest.approx(expected, nan_ok=True)
    right = [t == g for t, g in zip(truths, guesses, strict=True) if t != 255]
    expected = 100 * sum(right) / len(right) if right else math.nan
    assert metric.pixel_accuracy() == pytest.approx(expected, nan_ok=True)


def test_mean_iou_of_six_pixels_by_hand():
    # Class 0: 2 right of 3 that are or were called it. Class 1: 1 of 3. Class 2: 1 of 2.
    metric = counted(row(0, 0, 1, 1, 2, 1), row(0, 0, 0, 1, 2, 2), classes=3)
    assert metric.counts.tolist() == [[2, 1, 0], [0, 1, 0], [0, 1, 1]]
    assert metric.per_class() == pytest.approx([200 / 3, 100 / 3, 50.0])
    assert metric.score() == pytest.approx(50.0)
    assert metric.pixel_accuracy() == pytest.approx(400 / 6)


def test_images_are_scored_as_one_and_not_each_for_itself():
    # First image all class 0 and all right: 100. In the second class 0 has 0 of 1 and class 1 has
    # 3 of 4 pixels: 37.5. Their mean is 68.75, but together class 0 has 4 of 5: (80 + 75) / 2.
    images = [(row(0, 0, 0, 0), row(0, 0, 0, 0)), (row(1, 1, 1, 1), row(0, 1, 1, 1))]
    alone = [counted(*image, classes=2).score() for image in images]
    assert alone == pytest.approx([100.0, 37.5])
    together = MeanIoU(2)
    for predicted, labels in images:
        together.add(logits_for(predicted, 2), labels)
    assert together.score() == pytest.approx(77.5)


def test_ignored_pixels_count_neither_for_nor_against():
    clean = counted(row(0, 1, 1), row(0, 1, 0), classes=3)
    # Right, wrong, and of a class that nothing else is said to be.
    ignoring = counted(row(0, 0, 1, 1, 1, 2), row(0, 255, 1, 0, 255, 255), classes=3)
    assert torch.equal(ignoring.counts, clean.counts)
    assert ignoring.per_class() == pytest.approx([50.0, 50.0, None])


def test_a_class_that_is_neither_labelled_nor_predicted_is_left_out_of_the_mean():
    metric = counted(row(0, 0, 3, 3), row(0, 0, 3, 0), classes=5)
    assert metric.per_class() == pytest.approx([200 / 3, None, None, 50.0, None])
    assert metric.score() == pytest.approx((200 / 3 + 50) / 2)


def test_a_class_that_is_predicted_but_never_labelled_counts_as_nothing_right():
    metric = counted(row(0, 0, 2), row(0, 0, 0), classes=4)
    assert metric.per_class() == pytest.approx([200 / 3, None, 0.0, None])
    assert metric.score() == pytest.approx(100 / 3)


def test_a_class_that_is_labelled_but_never_predicted_counts_as_nothing_right():
    metric = counted(row(0, 0, 0), row(0, 0, 2), classes=4)
    assert metric.per_class() == pytest.approx([200 / 3, None, 0.0, None])
    assert metric.score() == pytest.approx(100 / 3)


def test_only_some_classes_are_averaged_of_those_that_occur():
    metric = counted(row(0, 0, 1, 1, 2, 1), row(0, 0, 0, 1, 2, 2), classes=4)
    assert metric.score(only=[1]) == pytest.approx(100 / 3)
    assert metric.score(only=(0, 2)) == pytest.approx((200 / 3 + 50) / 2)
    assert metric.score(only=[2, 3]) == pytest.approx(50.0)
    assert metric.score(only=range(4)) == metric.score()
    assert math.isnan(metric.score(only=[3]))
    assert math.isnan(metric.score(only=[]))


def test_pixels_mistaken_for_a_class_outside_only_still_count_against():
    # Half of class 0 is called 1; leaving class 1 out of the mean does not forgive that.
    metric = counted(row(0, 1), row(0, 0), classes=2)
    assert metric.score(only=[0]) == pytest.approx(50.0)


def test_predictions_may_come_as_classes():
    metric = MeanIoU(3)
    metric.add_predictions(row(0, 0, 1, 1, 2, 1), row(0, 0, 0, 1, 2, 2))
    expected = counted(row(0, 0, 1, 1, 2, 1), row(0, 0, 0, 1, 2, 2), classes=3)
    assert torch.equal(metric.counts, expected.counts)


def test_labels_may_be_bytes():
    # 18 * 19 + 18 fits no byte, so that ids which were not widened would come out as others.
    ids = row(18, 17, 255, 18).to(torch.uint8)
    metric = MeanIoU(19)
    metric.add_predictions(row(18, 18, 0, 18).to(torch.uint8), ids)
    assert metric.counts.sum() == 3
    assert metric.counts[18, 18] == 2
    assert metric.counts[17, 18] == 1


def test_labels_and_logits_are_left_as_they_came():
    logits, labels = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    labels[0, 0] = 255
    before = logits.clone(), labels.clone()
    MeanIoU(3).add(logits, labels)
    assert torch.equal(logits, before[0])
    assert torch.equal(labels, before[1])


# Errors


def test_error_is_the_share_of_images_with_another_class():
    metric = Errors()
    metric.add(logits_for([0, 1, 2, 1], 3), torch.tensor([0, 1, 2, 2]))
    assert metric.score() == 25.0
    metric.add(logits_for([0, 0, 0, 0], 3), torch.tensor([1, 1, 0, 1]))
    assert metric.score() == 50.0
    assert metric.counts.tolist() == [4, 8]


@given(seed=st.integers(0, 2**31), images=st.integers(1, 12), classes=st.integers(1, 5))
def test_error_is_that_of_a_loop_over_images(seed, images, classes):
    dice = torch.Generator().manual_seed(seed)
    logits = torch.randn(images, classes, generator=dice)
    labels = torch.randint(classes, (images,), generator=dice)
    labels[torch.rand(images, generator=dice) < 0.2] = 255
    metric = Errors()
    metric.add(logits, labels)
    verdicts = [
        max(range(classes), key=values.__getitem__) != label
        for values, label in zip(logits.tolist(), labels.tolist(), strict=True)
        if label != 255
    ]
    expected = 100 * sum(verdicts) / len(verdicts) if verdicts else math.nan
    assert metric.score() == pytest.approx(expected, nan_ok=True)


def test_ignored_images_are_neither_right_nor_wrong():
    metric = Errors()
    metric.add(logits_for([0, 1, 1], 2), torch.tensor([0, 255, 0]))
    assert metric.counts.tolist() == [1, 2]
    assert metric.score() == 50.0


# Both


def test_a_score_is_not_a_number_before_anything_was_counted():
    metric = MeanIoU(3)
    assert math.isnan(metric.score())
    assert math.isnan(metric.pixel_accuracy())
    assert metric.per_class() == [None, None, None]
    assert math.isnan(Errors().score())
    metric.add(torch.zeros(1, 3, 2, 2), torch.full((1, 2, 2), 255))
    assert math.isnan(metric.score())
    error = Errors()
    error.add(torch.zeros(2, 3), torch.tensor([255, 255]))
    assert math.isnan(error.score())


@given(batches)
def test_counts_of_processes_add_up_to_the_counts_of_one(case):
    whole, parts = MeanIoU(case[1]), [MeanIoU(case[1]) for _ in range(3)]
    for position, (logits, labels) in enumerate(drawn(*case)):
        whole.add(logits, labels)
        parts[position % 3].add(logits, labels)
    # Counts travel between processes as bytes, and start from those of an earlier session.
    arrived = [pickle.loads(pickle.dumps(part.counts)) for part in parts]
    joined = MeanIoU(case[1])
    for counts in arrived:
        joined.counts += counts
    assert torch.equal(joined.counts, whole.counts)
    assert joined.score() == pytest.approx(whole.score(), nan_ok=True)


def test_counts_of_errors_add_up_too():
    one, other = Errors(), Errors()
    one.add(logits_for([0, 1], 2), torch.tensor([0, 0]))
    other.add(logits_for([1, 1, 1, 1], 2), torch.tensor([1, 0, 0, 0]))
    both = Errors()
    both.counts = one.counts + other.counts
    assert (one.score(), other.score()) == (50.0, 75.0)
    assert both.score() == pytest.approx(400 / 6)  # and not the mean of the two


def test_counts_do_not_lose_a_pixel_after_billions():
    # A single-precision count would stand still at 2**24, a 32-bit one turn over at 2**31.
    metric = MeanIoU(2)
    metric.counts += torch.tensor([[2**40, 0], [0, 2**40]])
    metric.add(logits_for(row(0), 2), row(0))
    assert metric.counts.tolist() == [[2**40 + 1, 0], [0, 2**40]]
    error = Errors()
    error.counts += 2**40
    error.add(logits_for([0], 2), torch.tensor([0]))
    assert error.counts.tolist() == [2**40, 2**40 + 1]


def test_two_metrics_share_no_counts():
    for build in (Errors, lambda: MeanIoU(3)):
        first, second = build(), build()
        first.counts += 1
        assert second.counts.sum() == 0


def test_a_metric_says_what_it_is_called_and_which_way_is_up():
    assert (MeanIoU(2).name, MeanIoU(2).higher_is_better) == ("mIoU", True)
    assert (Errors().name, Errors().higher_is_better) == ("error", False)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("segmentation", MeanIoU),
        ("classification", Errors),
    ],
)
def test_a_task_has_its_metric_by_name(told, expected):
    metric = metric_for(told, 7)
    assert type(metric) is expected
    assert isinstance(metric, Metric)
    if expected is MeanIoU:
        assert metric.counts.shape == (7, 7)


def test_an_unknown_task_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'depth'.*classification, segmentation"):
        metric_for("depth", 7)


# Refusals


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        ((2, 4, 5, 6), (2, 5, 6)),  # another number of classes
        ((2, 3, 5, 6), (2, 6, 5)),  # turned
        ((2, 3, 5, 6), (1, 5, 6)),  # would broadcast
        ((2, 3, 5, 6), (2, 1, 5, 6)),  # a channel too many
        ((2, 3, 5, 6), (5, 6)),
        ((3, 5, 6), (5, 6)),  # no batch
        ((3,), (3,)),
    ],
)
def test_mean_iou_refuses_shapes_that_do_not_go_together_and_names_them(logits, labels):
    metric = MeanIoU(3)
    with pytest.raises(ValueError, match=r"expected \(B, 3, \.\.\.\)") as refusal:
        metric.add(torch.zeros(logits), torch.zeros(labels, dtype=torch.int64))
    assert str(logits) in str(refusal.value)
    assert str(labels) in str(refusal.value)
    assert metric.counts.sum() == 0


@pytest.mark.parametrize(
    ("logits", "labels"), [((4, 3), (3,)), ((4, 3), (1,)), ((4, 3), (4, 1)), ((4, 3), (4, 3))]
)
def test_errors_refuse_shapes_that_do_not_go_together_and_name_them(logits, labels):
    metric = Errors()
    with pytest.raises(ValueError, match="do not go with labels") as refusal:
        metric.add(torch.zeros(logits), torch.zeros(labels, dtype=torch.int64))
    assert str(logits) in str(refusal.value)
    assert str(labels) in str(refusal.value)
    assert metric.counts.sum() == 0


@pytest.mark.parametrize("label", [3, 7, 254, 256])
def test_a_label_of_a_class_that_does_not_exist_is_refused_and_named(label):
    metric = MeanIoU(3)
    message = f"class {label}; there are 3 classes, 0 to 2, and 255 for ignored"
    with pytest.raises(ValueError, match=message):
        metric.add(logits_for(row(0, 1, 2), 3), row(0, label, 2))
    assert metric.counts.sum() == 0


def test_examples_in_the_docstrings_run():
    results = doctest.testmod(scores)
    assert results.attempted == 7
    assert results.failed == 0


@pytest.mark.parametrize("predicted", [3, -1, 14])
def test_a_predicted_class_that_does_not_exist_is_refused(predicted):
    with pytest.raises(ValueError, match=f"a prediction says class {predicted}; there are 3"):
        MeanIoU(3).add_predictions(torch.tensor([[[predicted]]]), torch.tensor([[[0]]]))


@pytest.mark.parametrize("label", [3, -1])
def test_a_labelled_class_that_does_not_exist_is_refused(label):
    with pytest.raises(ValueError, match=f"a label says class {label}"):
        Errors().add(torch.eye(3)[:1], torch.tensor([label]))
    with pytest.raises(ValueError, match=f"a label says class {label}"):
        MeanIoU(3).add(torch.zeros(1, 3, 1, 1), torch.tensor([[[label]]]))


@pytest.mark.parametrize("shape", [(3,), (1, 3, 2, 2)])
def test_an_error_is_counted_of_whole_images_only(shape):
    with pytest.raises(ValueError, match=r"logits \(B, K\)"):
        Errors().add(torch.zeros(shape), torch.zeros(shape[:1] + shape[2:], dtype=torch.long))


def test_among_more_than_255_classes_the_255th_counts():
    logits = torch.zeros(2, 1000)
    logits[:, 255] = 1
    metric = Errors()
    metric.add(logits, torch.tensor([255, 0]))
    assert metric.score() == 50
    ious = MeanIoU(300)
    ious.add_predictions(torch.tensor([255, 255]), torch.tensor([255, 255]))
    assert ious.score() == 100
