"""The guard: harm done by adapting is noticed and undone, so that it never pays to do nothing.

Nobody on board knows the labels, but two answers to the same image can be compared without them: by
how sure they are, how many classes they see, and how far the classes they see are from those of the
source images, which the profile knows. So:

- at a *glance*, on every image and for next to nothing: have the answers moved since they were last
  compared, or has what is learned?
- at a *look*, the plain source model answers as well, and the answers are compared. Looks come one
  after another at the start and after whatever a glance found, then ever more rarely.

What is learned and does harm is rolled back to the last state that did none, and goes on in smaller
steps; after a few times it is held still (BeIN with γ = 0). And as long as even this seems no
better than the plain model, the plain model answers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from bestta.outputs import by_class, thinned
from bestta.profile import AnswerProfile

log = logging.getLogger("bestta.guard")

Mode = Literal["learning", "still", "source"]
MODES: tuple[Mode, ...] = ("learning", "still", "source")
ARMS = ("source", "still", "adapted")
WINDOWS = (*ARMS, *(f"{arm} lately" for arm in ARMS), "recent")
PREFIX = "guard/"
"""Names of what a guard remembers begin with this."""
GOOD = f"{PREFIX}good/"
NOT_FINITE = "guard, no look: an answer is not finite"


@dataclass(frozen=True)
class Weighing:
    """How the difference of two answers becomes points of score: docs/guard.md has the fit."""

    far: float = 21.0
    """Points lost per unit of distance from the classes of the source images."""
    unsure: float = 16.0
    """Points lost per nat of entropy."""
    varied: float = 12.0
    """Points won per nat of variety, the entropy of the classes seen."""
    at_home: float = 1.15
    """A model whose entropy is within this factor of that on source images is left alone."""
    margin: float = 0.5
    """Points that adapting must seem to be worth, unless others are asked for."""


SEGMENTATION = Weighing()
# A classifier is a good deal surer of the images it was trained on than of others like them.
CLASSIFICATION = Weighing(far=3.5, unsure=7.0, varied=6.0, at_home=1.7, margin=1.0)


@dataclass(frozen=True)
class Verdict:
    """What a look has found."""

    answered_by: Literal["adapted", "still", "source"]
    """Whose answer to this image is the best."""
    rolled_back: bool = False
    """Whether what was learned did harm and is undone."""
    returned: bool = False
    """Whether the adapter goes on from what it had learned before this image."""
    words: str = ""


class Guarded(Protocol):
    """What a guard asks of an adapter."""

    name: ClassVar[str]
    has_still: ClassVar[bool]

    def state(self) -> dict[str, Tensor]: ...  # noqa: D102
    def relearn(self, state: Mapping[str, Tensor]) -> None: ...  # noqa: D102
    def unlearn(self) -> None: ...  # noqa: D102


class Window:
    """The mean answer to the last ``length`` images or so."""

    def __init__(self, length: int = 8) -> None:
        self.length, self.count, self.entropy = length, 0, 0.0
        self.histogram: Tensor | None = None

    def add(self, answer: AnswerProfile) -> None:
        """Take in one more; the oldest fade."""
        self.count = min(self.count + 1, self.length)
        share = 1 / self.count
        seen, so_far = answer.histogram, self.histogram
        self.histogram = seen if so_far is None else so_far.lerp(seen, share)
        self.entropy += share * (float(answer.entropy) - self.entropy)

    def take(self, other: Window) -> None:
        """Go on from what another one holds."""
        self.count, self.entropy, self.histogram = other.count, other.entropy, other.histogram


def distance(one: Tensor, other: Tensor) -> float:
    """Total variation of two histograms: 0 for the same, 1 for nothing in common."""
    return float(0.5 * (one - other).abs().sum())


def variety(histogram: Tensor) -> float:
    """The entropy of the classes seen."""
    return float(-(histogram * histogram.clamp(min=1e-12).log()).sum())


def glance_at(logits: Tensor) -> AnswerProfile:
    """What an answer is like; of a large map, some thousand pixels are enough to tell."""
    return AnswerProfile.of(thinned(logits))


class Guard:
    """Decides who answers: the adapter as it learns, as it was before it learned, or the source.

    Args:
        home: How the model answers source images; without, variety and entropy have to do.
        margin: The plain model answers unless adapting seems to gain more points than this; by
            default as `Weighing` has it for the task.
        trusting: The method leaves images like the source's alone by itself: by default a
            classifier need prove no gain then, and is left if it seems to lose as much instead.
    """

    harm = 0.5
    """What is learned and seems to cost more points than this is rolled back; in a classifier that
    need prove no gain, than the margin of its task, for of one class each images tell less."""
    limit = 3
    """After so many times nothing more is learned until the stream has moved."""
    slower = 0.25
    """Each time, steps get smaller by this factor."""
    contrary = 0.5
    """What is learned and, over the last few looks, turns over so large a share of the answers
    that it would give unlearned, is rolled back."""
    wavering = 0.25
    """Points: who answers changes only if the other one is better by so much more."""
    familiar = 0.15
    """Classes that differ by no more than this from those of home are home's."""
    sure = 0.02
    """Nats of entropy that are next to none: below, a half or the double of it says nothing."""
    strayed = 0.05
    """What is learned has moved if its size has by this much, in source deviations."""
    enough = 32
    """So many images of one class each say something together."""
    patience = 4
    """So many images in a row that the method refuses are answered as those before them; more are
    a stream like any other."""
    rarest = 16
    """In a stream that does not move, one image in so many is looked at,"""
    close = 1.0
    """and more of them, while who is better is as close as this, in points,"""
    closer = 4
    """one in so many."""
    largest = 32 * 2**20
    """A state of more bytes is not kept beside the adapter: that one rolls back to its start."""

    def __init__(
        self,
        home: AnswerProfile | None = None,
        margin: float | None = None,
        *,
        trusting: bool = False,
    ) -> None:
        if margin is not None and not math.isfinite(margin):
            raise ValueError(f"guard_margin is a number of points, not {margin}.")
        if home is not None and not home.is_finite:
            raise ValueError(
                "the profile's answers are NaN or infinite: collect it anew, or guard=False."
            )
        self.home, self._margin, self._trusting = home, margin, trusting
        self.forget()

    def forget(self) -> None:
        """As if no image had been seen."""
        self.mode: Mode = "learning"
        self.pace = 1.0
        """Steps are this fraction of what they would be."""
        self.collapses = 0
        self.calm = 0
        """Looks since the last rollback at which what is learned did no harm."""
        self.looks = 0
        self.looks_left = 0
        self.wait = 0
        self.interval = 1
        self.size = 0.0
        self.gain = 0.0
        """Points that adapting seemed to gain at the last look."""
        self.scatter = 0.2
        """How far, in total variation, single answers are from their mean."""
        self.disagreement = 0.0
        """Share of the answers that what is learned turns over, over the last few looks."""
        self.windows = {name: Window() for name in WINDOWS}
        self.refusals = 0
        """Images in a row that the method has refused to learn from."""
        self.good: dict[str, Tensor] | None = None
        self._too_large = False
        self._several, self._segments = 4, False  # until an answer tells

    # --- when to look -----------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether the next image is to be looked at, whatever it shows."""
        return self.looks == 0 or self.looks_left > 0 or self.wait <= 0

    def shrugs(self, refused: bool) -> bool:
        """Take note of an image that the method has learned from, or refused to.

        Returns whether to leave it at that: a refused image among others says nothing of the
        stream. Many in a row are the stream: thick fog may be nothing to learn from, and all the
        same be something to see through.
        """
        self.refusals = self.refusals + 1 if refused else 0
        return self.looks > 0 and 0 < self.refusals <= self.patience

    def passed(self, seen: AnswerProfile, size: float) -> bool:
        """Take note of an image answered without a look. Returns whether it should have had one.

        Args:
            seen: What the answer is like.
            size: Of what is learned, in source deviations.
        """
        recent = self.windows["recent"]
        looked = self.windows["source" if self.mode == "source" else "adapted"]
        self.wait -= 1
        if not seen.is_finite:  # the plain model's: it says nothing of the stream
            return False
        recent.add(seen)
        moved = self._differs(recent, looked)
        # One picture shows many classes, and one that shows others than all before is looked at.
        odd = self._many and self._is_odd(seen, looked)
        self._note_scatter(seen, looked)
        if moved:
            self.look_closely()
        strayed = self.mode == "learning" and abs(size - self.size) > self.strayed
        return moved or odd or strayed

    def _differs(self, recent: Window, looked: Window) -> bool:
        """Whether the last few answers show other classes than those looked at, or are surer."""
        if recent.histogram is None or looked.histogram is None:
            return False
        apart = distance(recent.histogram, looked.histogram)
        far = max(0.12, self.scatter) if self._many else 0.4
        return apart > far or not 0.55 < self._change(recent.entropy, looked) < 1.8

    def _is_odd(self, seen: AnswerProfile, looked: Window) -> bool:
        """The same of a single one: twice as far from the others as they are from each other."""
        if looked.histogram is None:
            return False
        apart, change = distance(seen.histogram, looked.histogram), float(seen.entropy)
        return apart > 2 * max(0.12, self.scatter) or not 0.4 < self._change(change, looked) < 2.5

    def _change(self, entropy: float, looked: Window) -> float:
        """How many times as unsure as those looked at."""
        return (entropy + self.sure) / (looked.entropy + self.sure)

    def _note_scatter(self, seen: AnswerProfile, looked: Window) -> None:
        """Take note of how far a single answer is from the others."""
        if looked.histogram is not None and looked.count:
            apart = min(distance(seen.histogram, looked.histogram), 2 * self.scatter)
            self.scatter += 0.1 * (apart - self.scatter)

    def look_closely(self) -> None:
        """The stream has moved: look at the next images one after another, and forget the others.

        What kept failing may do in the new place, in smaller steps.
        """
        self.looks_left = self._several
        self.interval = 1
        self.collapses = min(self.collapses, self.limit - 1)
        if self.mode == "still":
            self.mode = "learning"
            log.info("look %d: guard, learning again: the stream has moved", self.looks + 1)
        for window in self.windows.values():
            window.count = 0

    def _suit(self, logits: Tensor) -> None:
        """What depends on the task and on the size of the batch, told from an answer."""
        classes = by_class(logits).shape[1]
        if self.home is not None and self.home.histogram.numel() != classes:
            raise ValueError(
                f"the profile knows answers of {self.home.histogram.numel()} classes, and the "
                f"model gives {classes}: collect it anew, or adapt with guard=False."
            )
        images = 4 if logits.dim() == 4 else -(-self.enough // len(logits))
        self._several = max(4, images)
        self._segments = logits.dim() == 4
        for name, window in self.windows.items():
            window.length = (4 if name in ARMS else 1) * self._several

    @property
    def weighing(self) -> Weighing:
        """What suits the task."""
        return SEGMENTATION if self._segments else CLASSIFICATION

    @property
    def margin(self) -> float:
        """Points that adapting must seem to be worth."""
        if self._margin is not None:
            return self._margin
        # From some dozens of images of one class each, it can be told to a point or so.
        sign = -1 if self._trusting and not self._segments else 1
        return sign * self.weighing.margin

    @property
    def trusted(self) -> bool:
        """A classifier that need prove no gain is left for harm alone.

        A few images of one class each cannot tell of harm, and being at home, by the entropy, is
        none.
        """
        return not self._segments and self.margin <= 0

    @property
    def _many(self) -> bool:
        """Whether a single answer shows many classes."""
        return self._segments

    # --- a look -----------------------------------------------------------------------------

    def look(
        self, adapter: Guarded, source: Tensor, adapted: Tensor, still: Tensor | None, size: float
    ) -> Verdict:
        """Compare the logits of the plain model with the adapter's, and decide who answers.

        Args:
            adapter: Rolled back if what it has learned does harm.
            source: The plain model's answer.
            adapted: The adapter's.
            still: The adapter's without what it has learned, where that makes a difference.
            size: Of what is learned, in source deviations.
        """
        self._suit(source)
        if self.looks == 0:
            self.looks_left = self._several
        answers = {"source": source, "still": adapted if still is None else still}
        answers["adapted"] = adapted
        seen = {name: glance_at(logits) for name, logits in answers.items()}
        if not all(answer.is_finite for answer in seen.values()):
            by_source = seen["source"].is_finite
            return Verdict("source" if by_source else "adapted", words=NOT_FINITE)
        odd = self._many and self._is_odd(seen["source"], self.windows["source"])
        self._note_scatter(seen["source"], self.windows["source"])
        if odd:
            self.look_closely()
        for name, answer in seen.items():
            self.windows[name].add(answer)
            self.windows[f"{name} lately"].add(answer)
        self.looks += 1
        self.looks_left = max(0, self.looks_left - 1)
        self.size = size
        compared = ("adapted", self._reference(adapter))
        now, unlearned = (by_class(answers[name]).argmax(1) for name in compared)
        turned = (now != unlearned).float().mean()
        few = self._several if self.trusted else 4
        self.disagreement += (float(turned) - self.disagreement) / min(self.looks, few)
        before = self.mode
        rolled_back = self.mode == "learning" and self._undo_harm(adapter)
        returned = self._choose(adapter)
        sure = abs(self.gain - self.margin) > self.close and self._known
        most = self.rarest if sure else self.closer
        self.interval = 1 if self.looks_left else min(2 * self.interval, most)
        self.wait = self.interval
        self.windows["recent"].take(self.windows["source" if self.mode == "source" else "adapted"])
        if self.mode == "source":
            by: Literal["adapted", "still", "source"] = "source"
        else:
            by = "still" if rolled_back else "adapted"
        if rolled_back or before != self.mode:
            words = self.words(rolled_back) or "guard, adapting again"
            log.info("%s, look %d: %s", adapter.name, self.looks, words)
        return Verdict(by, rolled_back, returned, self.words(rolled_back))

    def _undo_harm(self, adapter: Guarded) -> bool:
        """Roll back what is learned if it does harm; if not, keep it as the last good state."""
        reference = self._reference(adapter)
        # Of one class each, a few images tell nothing, and some dozens may differ by chance.
        late = "" if self.trusted else " lately"
        unlearned = self.windows[f"{reference}{late}"]
        if self.trusted and unlearned.count < self._several:
            return False
        harm = max(self.harm, self.weighing.margin) if self.trusted else self.harm
        # Learning lowers the entropy by itself, which proves nothing.
        points = self.points(f"adapted{late}", unlearned, credulous=False)
        harmless = points >= -harm
        # Other methods are held against the plain model, whose answers they are there to change.
        contrary = adapter.has_still and self.disagreement > self.contrary
        # A long memory is of what was seen with what is learned: without, it may well fail.
        contrary = contrary and not (self.trusted and points >= 0)
        if harmless and not contrary:
            self.calm += 1
            if self.calm >= 2 * self._several:
                self.calm = self.collapses = 0
                self.pace = min(1.0, self.pace / self.slower)
            if not self._too_large:
                self.good = adapter.state()
                size = sum(t.numel() * t.element_size() for t in self.good.values())
                self._too_large = size > self.largest
                self.good = None if self._too_large else self.good
            return False
        self.calm = 0
        self.collapses += 1
        self.pace *= self.slower
        again = self.collapses > 1 or self.good is None
        self._return(adapter, to_start=again)
        self._take_over(reference)
        self.size = 0.0
        if self.collapses >= self.limit:
            self.mode = "still" if adapter.has_still else "source"
        return True

    def _choose(self, adapter: Guarded) -> bool:
        """Whether the adapter or the plain model answers from here on.

        Returns whether the adapter was put back to what it had learned before.
        """
        source = self.windows["source"]
        self.gain = self.points("adapted", source, credulous=adapter.has_still)
        if adapter.has_still:
            # What is learned was judged before; whether to adapt at all, by what is not. A long
            # memory is of what was seen with it, though, and does not suit what is without.
            learned = self.points("adapted", source, credulous=False)
            self.gain = self.points("still", source)
            self.gain = max(self.gain, learned) if self.trusted else self.gain
        if self.trusted and source.count < self._several:
            return False
        back = self.mode == "source"
        worth = self.gain > self.margin + (self.wavering if back else -self.wavering)
        if worth and (self.trusted or not self.at_home):
            tried = self.collapses >= self.limit
            if back and (adapter.has_still or not tried):
                self.mode = "still" if tried else "learning"
                if self.mode == "learning" and self.collapses == 0:
                    self._return(adapter)
                    return True
        elif not back:
            self.mode = "source"
            # The next looks are at what is not learned; what is learned waits in the good state.
            self._return(adapter, to_start=True)
            self._take_over(self._reference(adapter))
        return False

    def _reference(self, adapter: Guarded) -> str:
        """Who answers if nothing is learned."""
        return "still" if adapter.has_still else "source"

    def begin_anew(self, adapter: Guarded) -> None:
        """The adapter has forgotten by itself what it had learned elsewhere."""
        self.good = None
        self.size = 0.0
        self._take_over(self._reference(adapter))

    def _take_over(self, arm: str) -> None:
        """What is learned is gone: what was seen of it counts no more."""
        self.disagreement = 0.0
        for lately in ("", " lately"):
            self.windows[f"adapted{lately}"].take(self.windows[f"{arm}{lately}"])

    def _return(self, adapter: Guarded, to_start: bool = False) -> None:
        """Put the adapter back to the last good state, or to where it started."""
        if to_start or self.good is None:
            adapter.unlearn()
        else:
            adapter.relearn(self.good)

    def points(self, one: str, other: Window, *, credulous: bool = True) -> float:
        """About how many points of score the answers of ``one`` are better than ``other``.

        Without ``credulous``, being surer counts for nothing.
        """
        first = self.windows[one]
        assert first.histogram is not None
        assert other.histogram is not None
        weighing, surer = self.weighing, other.entropy - first.entropy
        classes = weighing.varied * (variety(first.histogram) - variety(other.histogram))
        if self.home is not None:
            home = self.home.histogram
            nearer = distance(other.histogram, home) - distance(first.histogram, home)
            classes += weighing.far * nearer
        if not self._many:
            # A stream may well be of one class for a while: to see others is no merit then.
            classes *= min(1.0, 4 * (1 - float(other.histogram.max())))
            # In noise a classifier may be surer, and wrong: that alone proves nothing.
            credulous = credulous and classes > 0
        return classes + weighing.unsure * (surer if credulous else min(0.0, surer))

    @property
    def _known(self) -> bool:
        """Whether there was time to compare."""
        return self.windows["source"].count >= 2 * self._several

    @property
    def at_home(self) -> bool:
        """Whether the plain model is as sure of its answers as on source images.

        In pictures of many classes it must also see those of the source: in fog a model may be as
        sure as ever that everything is road.
        """
        source = self.windows["source"]
        if self.home is None or source.histogram is None:
            return False
        if self._many and distance(source.histogram, self.home.histogram) > self.familiar:
            return False
        return source.entropy <= self.weighing.at_home * float(self.home.entropy)

    def words(self, rolled_back: bool = False) -> str:
        """What was decided, and why; up to the colon the same for every image."""
        harm = "what was learned did harm"
        if self.collapses > 1:
            harm += f", {self.collapses} times in a row"
        if rolled_back:
            goes_on = f"steps are {self.pace:.3g} of what they were"
            if self.mode == "source":
                goes_on = "the source model answers"
            return f"guard, rolled back: {harm}; {goes_on}"
        if self.mode == "source" and self.at_home and not self.trusted:
            return "guard, source model: it is as sure of its answers as on source images"
        if self.mode == "source" and self.collapses >= self.limit and self.gain > self.margin:
            return f"guard, source model: {harm}"
        if self.mode == "source":
            return (
                f"guard, source model: adapting seems worth {self.gain:+.2f} points; from "
                f"{self.margin + self.wavering:.4g} on it is taken up again"
            )
        if self.mode == "still":
            return f"guard, held still: {harm}"
        return ""

    # --- what is remembered -----------------------------------------------------------------

    _NUMBERS = (
        "pace", "collapses", "looks", "looks_left", "wait", "interval", "size", "gain",
        "disagreement", "calm", "scatter", "refusals",
    )  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """All of it, by name."""
        if self.looks == 0:
            return {}
        numbers: list[float] = [MODES.index(self.mode), self._several, self._segments]
        numbers += [getattr(self, name) for name in self._NUMBERS]
        for window in self.windows.values():
            numbers += [window.length, window.count, window.entropy]
        histograms = [window.histogram for window in self.windows.values()]
        return {
            f"{PREFIX}numbers": torch.tensor(numbers, dtype=torch.float64),
            f"{PREFIX}histograms": torch.stack([h for h in histograms if h is not None]),
            **{f"{GOOD}{name}": value for name, value in (self.good or {}).items()},
        }

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise a ValueError if a state from outside holds what no guard remembers."""
        numbers = state.get(f"{PREFIX}numbers")
        if numbers is None:
            return
        histograms = state.get(f"{PREFIX}histograms", torch.empty(0))
        first = 3 + len(self._NUMBERS)
        whole = numbers.shape == (first + 3 * len(WINDOWS),) and bool(numbers.isfinite().all())
        rows = histograms.dim() == 2 and len(histograms) == len(WINDOWS)
        classes = self.home.histogram.numel() if self.home is not None else None
        if (
            not whole
            or not rows
            or classes not in (None, histograms.shape[1])
            or not bool((histograms >= 0).all())
            or numbers[0] not in (0, 1, 2)
            or not 0 < numbers[3] <= 1
            or bool((numbers[first::3] < 1).any())
            or bool((numbers[first + 1 :: 3] < 0).any())
        ):
            raise ValueError(
                "this state is damaged, or of another version: what its guard remembers is not "
                "that of a guard. Load it with guard=False to go on from what was learned."
            )

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned; start anew from a state without."""
        self.forget()
        if f"{PREFIX}numbers" not in state:
            return
        numbers = state[f"{PREFIX}numbers"].tolist()
        self.mode = MODES[int(numbers[0])]
        self._several, self._segments = int(numbers[1]), bool(numbers[2])
        rest = numbers[3:]
        for name in self._NUMBERS:
            setattr(self, name, type(getattr(self, name))(rest.pop(0)))
        for number, window in enumerate(self.windows.values()):
            window.length, window.count, window.entropy = int(rest[0]), int(rest[1]), rest[2]
            window.histogram = state[f"{PREFIX}histograms"][number]
            rest = rest[3:]
        good = {n.removeprefix(GOOD): t for n, t in state.items() if n.startswith(GOOD)}
        self.good = good or None
