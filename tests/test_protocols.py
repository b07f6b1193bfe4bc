"""Streams: their order, their blocks, and that nothing depends on how they are played."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bestta import protocols
from bestta.data import ImageSet, Sample, Streets, UnreadableImage
from bestta.data.corruptions import corrupt
from bestta.data.seeds import generator
from bestta.data.weather import simulate
from bestta.protocols import Domain
from processes import end_within


class Squares(ImageSet):
    """Small images that tell their own number; those in ``broken`` cannot be read."""

    kind = "squares"

    def __init__(self, count: int, broken: tuple[int, ...] = (), start: int = 0) -> None:
        super().__init__()
        self.count, self.broken, self.start = count, broken, start

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"square-{self.start + index}"

    def read(self, index: int) -> Sample:
        if index in self.broken:
            raise UnreadableImage(f"{self.name(index)} is torn")
        image = np.full((16, 32, 3), self.start + index, np.uint8)
        return Sample(self.name(index), image, self.start + index)


@dataclass
class Grain:
    """A stochastic effect that notes what it was asked for."""

    seen: list[object] = field(default_factory=list)

    def __call__(self, image, seed):
        self.seen.append(seed)
        return image + generator(seed).integers(0, 20, image.shape, dtype=np.uint8)


def fail_on_seven(image, seed):
    if image[0, 0, 0] == 7:
        raise ZeroDivisionError("a bug in the effect")
    return image


def grainy(count: int = 6, **options) -> protocols.Stream:
    domains = [Domain("a", Squares(count), Grain()), Domain("b", Squares(count), None)]
    return protocols.continual(domains, rounds=2, **options)


def content(frame):
    return (
        frame.position, frame.block, frame.domain, frame.name, frame.image.tobytes(), frame.label
    )  # fmt: skip


@pytest.mark.parametrize("workers", [1, 3])
def test_frames_are_the_same_for_any_number_of_workers(workers):
    stream = grainy()
    alone = [content(frame) for frame in stream.frames()]
    assert [content(frame) for frame in stream.frames(workers=workers)] == alone
    assert [frame[0] for frame in alone] == list(range(24))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_entered_anywhere_goes_on_as_if_played_from_its_start(workers):
    whole = [content(frame) for frame in grainy().frames()]
    for start in (0, 1, 11, 12, 23, 24):
        rest = [content(frame) for frame in grainy().frames(start, workers=workers)]
        assert rest == whole[start:]


def test_what_lies_before_the_start_is_not_rendered():
    grain = Grain()
    stream = protocols.continual([Domain("a", Squares(100), grain)], rounds=50)
    frame = next(stream.frames(4321))
    assert frame.name == "square-21"
    assert frame.block.round == 43
    assert len(grain.seen) == 1
    assert content(stream[4321]) == content(frame)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    rounds=st.integers(1, 4),
    mixed=st.booleans(),
)
def test_blocks_tile_the_stream(sizes, rounds, mixed):
    domains = [Domain(str(number), Squares(size)) for number, size in enumerate(sizes)]
    recipe = protocols.mixed if mixed else protocols.continual
    stream = recipe(domains, rounds=rounds)
    positions = [p for block in stream.blocks for p in range(block.start, block.stop)]
    assert positions == list(range(len(stream))) == list(range(rounds * sum(sizes)))
    assert [block.index for block in stream.blocks] == list(range(len(stream.blocks)))
    assert all(stream.block_at(p).start <= p < stream.block_at(p).stop for p in positions)
    assert stream.rounds == rounds


def test_continual_takes_the_domains_in_order_round_after_round():
    stream = protocols.continual(protocols.weather(Squares(3)), rounds=10)
    names = [block.name for block in stream.blocks]
    assert names == ["fog", "night", "rain", "snow"] * 10  # Sec. 4.1 of the paper
    assert [block.round for block in stream.blocks] == [r for r in range(10) for _ in range(4)]
    assert {len(block) for block in stream.blocks} == {3}


def test_gradual_swells_and_fades_corruption_by_corruption():
    stream = protocols.gradual(Squares(2))
    severities = (1, 2, 3, 4, 5, 4, 3, 2, 1)  # 36 blocks, as in the paper's table
    expected = [f"{n}-{s}" for n in ("brightness", "fog", "frost", "snow") for s in severities]
    assert [block.name for block in stream.blocks] == expected
    last = stream[len(stream) - 1]
    sample = Squares(2)[1]
    expected = corrupt(sample.image, "snow", 1, seed=(0, 0, sample.name))
    assert np.array_equal(last.image, expected)


def test_gradual_shows_a_sample_on_the_way_down_as_on_the_way_up():
    stream = protocols.gradual(Squares(2), ["frost"])
    assert np.array_equal(stream[2].image, stream[14].image)  # severity 2, up and down
    assert not np.array_equal(stream[2].image, stream[4].image)


def test_cifar10c_follows_the_order_of_the_papers_table():
    stream = protocols.cifar10c(Squares(2))
    assert [block.name for block in stream.blocks] == [
        "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur",
        "motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast",
        "elastic_transform", "pixelate", "jpeg_compression",
    ]  # fmt: skip
    noisy, clean = stream[1], Squares(2)[1]
    assert np.array_equal(
        noisy.image,
        corrupt(clean.image, "gaussian_noise", 5, seed=(0, 0, clean.name), family="cifar"),
    )


def test_cifar10c_plays_the_official_files_as_they_are(tmp_path):
    numbers = np.random.default_rng(0)
    labels = np.tile(np.arange(10, dtype=np.uint8), 5000)
    np.save(tmp_path / "labels.npy", labels)
    fog = numbers.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "fog.npy", fog)
    stream = protocols.cifar10c(tmp_path, severity=3, order=["fog"])
    assert len(stream) == 10_000
    frame = stream[123]
    assert np.array_equal(frame.image, fog[20_123])  # severities stacked 1 → 5, 10,000 each
    assert frame.label == 3


def test_mixed_shows_every_image_of_every_domain_once_a_round():
    domains = [Domain("a", Squares(30)), Domain("b", Squares(40, start=100))]
    stream = protocols.mixed(domains, rounds=2)
    first, second = ([stream[p].label for p in range(b.start, b.stop)] for b in stream.blocks)
    everything = Counter([*range(30), *range(100, 140)])
    assert Counter(first) == Counter(second) == everything
    assert first != second
    frames = list(stream.frames())
    assert all((frame.domain == "b") == (frame.label >= 100) for frame in frames)
    changes = sum(a.domain != b.domain for a, b in pairwise(frames))
    # Independent draws change with probability 2·(30/70)·(40/70) = 0.49 a step.
    assert 0.35 < changes / len(frames) < 0.63
    again = protocols.mixed(domains, rounds=2)
    assert [f.label for f in again.frames()] == first + second
    other = protocols.mixed(domains, rounds=2, seed=1)
    assert [f.label for f in other.frames()] != first + second


def test_single_is_the_set_as_it_is():
    stream = protocols.single(Squares(4))
    assert [block.name for block in stream.blocks] == ["squares"]
    assert [(f.label, f.image[0, 0, 0]) for f in stream.frames()] == [(i, i) for i in range(4)]


def test_shuffling_reorders_each_block_in_its_own_way():
    stream = protocols.continual([Domain("a", Squares(20))], rounds=2, shuffle=True, seed=3)
    first, second = ([stream[p].label for p in range(b.start, b.stop)] for b in stream.blocks)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second != list(range(20)) != first


def test_rounds_repeat_the_same_frames_unless_they_are_redrawn():
    def rounds(**options):
        stream = protocols.continual([Domain("a", Squares(3), Grain())], rounds=2, **options)
        images = [frame.image for frame in stream.frames()]
        return [np.array_equal(images[i], images[i + 3]) for i in range(3)]

    assert rounds() == [True] * 3
    assert rounds(redraw=True) == [False] * 3


def test_another_seed_draws_another_weather():
    def first(seed):
        return protocols.continual(protocols.weather(Squares(2)), seed=seed)[0].image

    assert not np.array_equal(first(0), first(1))
    sample = Squares(2)[0]
    expected = simulate(sample.image, "fog", 3, seed=(1, 0, sample.name))
    assert np.array_equal(first(1), expected)


def test_two_samples_of_a_block_draw_different_noise():
    stream = protocols.continual([Domain("a", Squares(2), Grain())], rounds=1)
    assert not np.array_equal(stream[1].image - 1, stream[0].image)


def test_the_adapter_is_handed_images_and_nothing_else():
    images = list(grainy().images(5, 9))
    assert [type(image) for image in images] == [np.ndarray] * 4
    assert [i.tobytes() for i in images] == [f.image.tobytes() for f in grainy().frames(5, 9)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_named_left_out_and_counted(workers):
    stream = protocols.continual([Domain("a", Squares(5, broken=(1, 4)))], rounds=2)
    with pytest.warns(UserWarning, match=r"skipped square-\d: square-\d is torn") as caught:
        frames = list(stream.frames(workers=workers))
    assert [frame.position for frame in frames] == [0, 2, 3, 5, 7, 8]
    assert [skipped.name for skipped in stream.skipped] == ["square-1", "square-4"] * 2
    named = [str(warning.message).split(":")[0] for warning in caught]
    assert named == ["skipped square-1", "skipped square-4"]  # once each, noted each time


@pytest.mark.parametrize("workers", [0, 1])
def test_playing_a_stream_draws_nothing_from_torchs_generator(workers):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(grainy(2).frames(workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_bug_in_an_effect_reaches_the_consumer():
    stream = protocols.continual([Domain("a", Squares(9), fail_on_seven)], rounds=1)
    with pytest.raises(ZeroDivisionError, match="a bug in the effect"):
        list(stream.frames(workers=2))


def test_an_abandoned_stream_leaves_no_process_behind():
    before = set(multiprocessing.active_children())
    frames = grainy(50).frames(workers=2)
    next(frames)
    assert len(set(multiprocessing.active_children()) - before) == 2
    frames.close()
    assert set(multiprocessing.active_children()) <= before


def test_workers_end_when_the_consumer_is_killed(tmp_path):
    code = (
        "import multiprocessing, os, signal, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_protocols import grainy\n"
        "frames = grainy(50).frames(workers=2)\n"
        "next(frames)\n"
        "print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    # Not through pipes: their ends would be held by the workers.
    with open(tmp_path / "out", "w") as out:
        subprocess.run(command, stdout=out, check=False)
    workers = [int(pid) for pid in (tmp_path / "out").read_text().split()]
    assert len(workers) == 2
    assert end_within(30, workers)


def test_a_stream_survives_pickling():
    stream = protocols.continual(protocols.weather(Squares(3)), rounds=2)
    copy = pickle.loads(pickle.dumps(stream))
    assert content(copy[17]) == content(stream[17])


def test_silly_streams_are_refused():
    domain = Domain("a", Squares(3))
    with pytest.raises(ValueError, match="at least one domain"):
        protocols.continual([])
    with pytest.raises(ValueError, match="rounds must be 1 or more, got 0"):
        protocols.mixed([domain], rounds=0)
    with pytest.raises(ValueError, match="every domain given is empty"):
        protocols.single(Squares(0))
    with pytest.raises(TypeError, match="expected domains, got Squares"):
        protocols.continual([Squares(3)])
    stream = protocols.continual([domain], rounds=1)
    with pytest.raises(IndexError, match="position 3 of a stream of 3"):
        stream[3]
    with pytest.raises(IndexError, match="position -1"):
        stream[-1]
    with pytest.raises(IndexError, match="frames 2 to 9 of a stream of 3"):
        stream.frames(2, 9)
    with pytest.raises(ValueError, match="workers must be 0 or more"):
        stream.frames(workers=-1)


def test_no_warning_is_raised_for_a_whole_stream():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(grainy().frames(workers=1))) == 24


def fail_hard_on_seven(image, seed):
    if image[0, 0, 0] == 7:
        os._exit(1)
    return image


def tell_of_the_process(image, seed):
    image = image.copy()
    image[0, 0, 0] = cv2.getNumThreads()
    image[0, 0, 1] = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return image


def test_a_stream_can_be_looped_over_and_leaves_broken_images_out():
    stream = protocols.single(Squares(4, broken=(1,)))
    with pytest.warns(UserWarning, match="skipped square-1"):
        assert [frame.position for frame in stream] == [0, 2, 3]


def test_workers_are_only_so_far_ahead(monkeypatch):
    submitted = []

    class Noting(ProcessPoolExecutor):
        def submit(self, function, position):
            submitted.append(position)
            return super().submit(function, position)

    monkeypatch.setattr("bestta.protocols.stream.ProcessPoolExecutor", Noting)
    frames = grainy(50).frames(10, workers=2)
    next(frames)
    assert submitted == list(range(10, 18))  # two workers, four frames each
    next(frames)
    assert submitted == list(range(10, 19))
    frames.close()


def test_workers_use_one_thread_and_leave_ctrl_c_to_the_consumer():
    stream = protocols.continual([Domain("a", Squares(1), tell_of_the_process)], rounds=1)
    (frame,) = stream.frames(workers=1)
    assert frame.image[0, 0, 0] in (0, 1)  # OpenCV calls one thread 1 or, unset, 0
    assert frame.image[0, 0, 1] == 1


def test_a_killed_worker_is_told_with_the_frame_to_go_on_from():
    stream = protocols.continual([Domain("a", Squares(20), fail_hard_on_seven)], rounds=1)
    seen = []
    frames = stream.frames(2, workers=1)
    with pytest.raises(RuntimeError, match="first frame not handed out is") as caught:
        seen.extend(frame.position for frame in frames)
    assert f"is {2 + len(seen)}:" in str(caught.value)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_may_be_started_in_any_way(method):
    code = (
        "import multiprocessing\n"
        "from bestta import protocols\n"
        "from bestta.data import Streets\n"
        "if __name__ == '__main__':\n"
        f"    multiprocessing.set_start_method({method!r})\n"
        "    stream = protocols.single(Streets(2, size=(64, 32)))\n"
        "    print(sum(int(frame.image.sum()) for frame in stream.frames(workers=1)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = sum(int(sample.image.sum()) for sample in Streets(2, size=(64, 32)))
    assert int(done.stdout) == expected


@pytest.mark.parametrize(
    "stream",
    [
        lambda seed: protocols.gradual(Squares(2), ["frost"], seed=seed),
        lambda seed: protocols.cifar10c(Squares(2), order=["gaussian_noise"], seed=seed),
        lambda seed: protocols.mixed(protocols.weather(Squares(1), ["snow"]), seed=seed),
    ],
)
def test_every_recipe_hands_its_seed_on(stream):
    assert np.array_equal(stream(3)[0].image, stream(3)[0].image)
    assert not np.array_equal(stream(3)[0].image, stream(4)[0].image)


def test_the_order_of_a_shuffled_block_depends_on_seed_and_domain():
    def orders(seed):
        domains = [Domain("a", Squares(20)), Domain("b", Squares(20))]
        stream = protocols.continual(domains, rounds=1, shuffle=True, seed=seed)
        return [[stream[p].label for p in range(b.start, b.stop)] for b in stream.blocks]

    assert orders(1)[0] != orders(1)[1]
    assert orders(1)[0] != orders(2)[0]


def test_redrawing_changes_with_the_round_and_not_with_the_block():
    domains = [Domain("a", Squares(1), Grain()), Domain("b", Squares(1), Grain())]
    for recipe in (protocols.continual, protocols.mixed):
        stream = recipe(domains, rounds=2, redraw=True)
        first, second, third, fourth = (frame.image.tobytes() for frame in stream.frames())
        assert first == second != third == fourth


def test_continual_goes_through_ten_rounds_unless_told_otherwise():
    assert protocols.continual(protocols.weather(Squares(1))).rounds == 10  # as in the paper


def test_acdc_takes_the_photographs_of_the_split_at_the_size_that_is_asked_for(tmp_path):
    for condition in ("fog", "night", "rain", "snow"):
        for part, end in (("rgb_anon", "rgb_anon"), ("gt", "gt_labelTrainIds")):
            folder = tmp_path / part / condition / "val" / "GOPR0475"
            folder.mkdir(parents=True)
            pixels = np.zeros((24, 48) if part == "gt" else (24, 48, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"GOPR0475_frame_000041_{end}.png")
    domains = protocols.acdc(tmp_path, split="val", size=(24, 12))
    stream = protocols.continual(domains, rounds=1)
    assert [block.name for block in stream.blocks] == ["fog", "night", "rain", "snow"]
    assert {frame.image.shape for frame in stream} == {(12, 24, 3)}


def test_mistakes_are_told_where_they_are_made():
    stream = grainy()
    for call in (stream.frames, stream.images):
        with pytest.raises(IndexError, match="frames 99 to 24"):
            call(99)  # not at the first frame, but here
    with pytest.raises(TypeError, match=r"got slice\(1, 3, None\); frames\(start, stop\)"):
        stream[1:3]
    with pytest.raises(TypeError, match=r"such as Folder.path.; got '/data/dashcam'"):
        protocols.weather("/data/dashcam")
    with pytest.raises(TypeError, match=r"\['fog'\] is a list of one"):
        protocols.weather(Squares(1), "fog")
    with pytest.raises(TypeError, match=r"weather.images., corruptions.images."):
        protocols.continual(Squares(2))


def test_every_other_frame_of_each_block_looks_as_it_did():
    domains = [Domain("a", Squares(5), Grain()), Domain("b", Squares(4, start=10), Grain())]
    stream = protocols.continual(domains, rounds=2, shuffle=True, seed=3)
    thin = stream.every(2)
    assert [(b.name, b.round, len(b)) for b in thin.blocks] == [
        ("a", 0, 3), ("b", 0, 2), ("a", 1, 3), ("b", 1, 2),
    ]  # fmt: skip
    expected = [stream[p] for b in stream.blocks for p in range(b.start, b.stop, 2)]
    assert [f.name for f in thin] == [f.name for f in expected]
    assert all(np.array_equal(a.image, b.image) for a, b in zip(thin, expected, strict=True))
    with pytest.raises(ValueError, match="got 0"):
        stream.every(0)


def test_names_are_known_without_reading():
    stream = protocols.mixed([Domain("a", Squares(3, broken=(0, 1, 2))), Domain("b", Squares(2))])
    names = [stream.name_at(position) for position in range(len(stream))]
    assert Counter(names) == Counter(
        [("a", f"square-{n}") for n in range(3)] + [("b", f"square-{n}") for n in range(2)]
    )


def test_what_is_kept_is_rendered_once_and_the_rest_each_round():
    grain = Grain()
    plain = protocols.continual([Domain("a", Squares(4), Grain())], rounds=3)
    frame = 16 * 32 * 3
    stream = protocols.continual([Domain("a", Squares(4), grain)], rounds=3).keeping(2 * frame)
    played = list(stream)
    assert len(grain.seen) == 2 + 2 * 3  # two fit; the other two are rendered in all three rounds
    assert all(
        np.array_equal(a.image, b.image)
        and (a.name, a.label, a.block) == (b.name, b.label, b.block)
        for a, b in zip(played, plain, strict=True)
    )
    assert len(pickle.dumps(stream)) < 2 * frame


def test_nothing_is_kept_where_each_round_is_drawn_anew():
    grain = Grain()
    stream = protocols.continual([Domain("a", Squares(2), grain)], rounds=2, redraw=True)
    first, second, third, _ = stream.keeping(10**6)
    assert len(set(map(str, grain.seen))) == 4
    assert not np.array_equal(first.image, third.image)
    assert second.block.round == 0
