"""The search: layers first, one and several; then ρ, the stream's statistics, and learning.

Cheap things come first, and what is dearer must win by more than chance. Layers and ρ are judged
with γ held still: each frame then stands for itself, few frames sort out most of the options, and
only the best see all of them. What remembers is judged on one stream that goes on through the
conditions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from torch import nn

from bestta.adapters import adapt
from bestta.calibration.candidates import Candidate
from bestta.calibration.evaluations import Evaluations
from bestta.calibration.scoring import Gain, Judge
from bestta.calibration.streams import Streams
from bestta.profile import SourceProfile
from bestta.progress import Progress

Settings = Mapping[str, Any]
Stream = Literal["blocks", "continual"]

LONG: Stream = "continual"
LOSSES = ("lambda_style", "lambda_content", "lambda_entropy", "lambda_l2")

BARE: Settings = {"guard": False, "scales": ()}
"""What a guard would undo is what is to be found out, and second looks would only cost."""

RHO = (0.3, 0.5, 0.7, 0.9, 1.0)
HARMLESS_RHO = 0.1
STATISTICS_DECAY = (0.5, 0.8, 0.9)
LEARNING_RATES = {"segmentation": (1e-3, 3e-3, 1e-2), "classification": (1e-3, 2e-3, 5e-3)}
"""Of SGD and of Adam, as the presets have it."""
ENTROPY_SHARES = (0.5, 0.0)
"""Of the preset's weight of the entropy."""

MOST_LAYERS = 3
PARTNERS = 5
"""So many of the best layers are tried as a second and a third."""
FINALISTS = 2
"""So many of the options see all frames; twice as many of single layers, on which all rests."""
NEIGHBOURHOODS = 3
"""Blocks are tried beside so many of the best stages: gains change little by little in depth."""
RUNNERS_UP = 2
"""So many other choices of layers are tried once more with the settings found."""


class CutShort(Exception):
    """The time is up."""


@dataclass(frozen=True)
class Evaluation:
    """Settings, and what they gained."""

    step: str
    """For which step of the search."""
    settings: Settings
    stream: Stream
    frames: int
    """Of each condition."""
    gain: Gain

    @property
    def layers(self) -> tuple[str, ...]:
        """Where BeIN was."""
        return tuple(self.settings["layers"])

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "step": self.step,
            "settings": plain(self.settings),
            "stream": self.stream,
            "frames": self.frames,
            "gain": round(self.gain.value, 3),
            "error": round(self.gain.error, 3),
            "conditions": {name: round(v, 3) for name, v in self.gain.conditions.items()},
        }


def plain(settings: Settings) -> dict[str, Any]:
    """Settings as JSON has them."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}


@dataclass(frozen=True)
class Lengths:
    """How many frames of each condition are played."""

    short: int
    """To sort out."""
    full: int
    """To decide."""
    long: int
    """In the stream that goes on through the conditions."""

    @property
    def spell(self) -> int:
        """For how many frames of that stream the weather stays as it is."""
        return -(-self.long // 2)


class Search:
    """Plays streams with one setting after another, and keeps the best."""

    def __init__(
        self,
        model: nn.Module,
        profile: SourceProfile,
        streams: Streams,
        judge: Judge,
        evaluations: Evaluations,
        *,
        base: Settings,
        fixed: Settings,
        lengths: Lengths,
        deadline: float | None = None,
        stop: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> None:
        """A search.

        Args:
            model: The source model.
            profile: Its statistics at every candidate.
            streams: What is played.
            judge: Who scores it.
            evaluations: What is known already.
            base: The settings to start from: ρ, learning rate and weights of the preset.
            fixed: Settings that stay as they are in all that is tried.
            lengths: How much is played.
            deadline: When to begin nothing more, by `time.monotonic`.
            stop: Not empty once somebody wishes to stop.
            progress: Where to tell how far it is.
        """
        self.model, self.profile, self.streams, self.judge = model, profile, streams, judge
        self.evaluations, self.base, self.fixed = evaluations, dict(base), dict(fixed)
        self.lengths, self.deadline, self.stop = lengths, deadline, stop
        self.progress = progress
        self.order = {name: n for n, name in enumerate(profile.layers)}
        self.log: list[Evaluation] = []
        self.failed: dict[str, str] = {}
        self.played = 0
        self.cut_short = False
        self.best: Evaluation | None = None
        style = [n for n in streams.names if judge.weights[n] >= 1]
        self.continual_names = style[:1] + style[1::2] if len(style) > 5 else style

    # --- one setting ----------------------------------------------------------------------

    def setting(self, layers: Iterable[str], **changes: Any) -> dict[str, Any]:
        """The base settings at ``layers``, γ held still, with ``changes`` and what is fixed."""
        named = {"layers": tuple(sorted(layers, key=self.order.__getitem__))}
        still = {"lr": 0.0, "statistics_decay": 0.0}
        return {**self.base, **self.fixed, **still, **changes, **named}

    def evaluate(
        self, step: str, settings: Settings, *, stream: Stream = "blocks", frames: int | None = None
    ) -> Evaluation:
        """Play a stream with ``settings``, or what was played before, and score it."""
        remembers = settings["lr"] > 0 or settings["statistics_decay"] > 0
        if stream == "continual":
            names, frames, spell = self.continual_names, self.lengths.long, self.lengths.spell
        else:
            names, frames, spell = self.streams.names, frames or self.lengths.full, 0
        lengths = {name: self.streams.length(name, self._share(name, frames)) for name in names}
        key = json.dumps([stream, plain(settings)], sort_keys=True)
        counts = self.evaluations.counts(key)
        if any(len(counts.get(name, ())) < n for name, n in lengths.items()):
            if self.played and self.deadline is not None and time.monotonic() > self.deadline:
                raise CutShort
            self.played += 1
            wanted = {**settings, **BARE}
            with adapt(self.model, self.profile, method="bestta", **wanted) as adapter:
                for name, n in lengths.items():
                    known = counts.setdefault(name, [])
                    begin = len(known)
                    if remembers:
                        begin, known = 0, []
                    known += self.streams.play(
                        adapter, name, begin, n, spell=spell, together=not remembers
                    )
                    counts[name] = known
            self.evaluations.put(key, counts)
        if self.progress is not None:
            self.progress.advance()
        played = {name: counts[name][:n] for name, n in lengths.items()}
        source = {name: self.streams.source(name, n, spell) for name, n in lengths.items()}
        done = Evaluation(step, settings, stream, frames, self.judge.gain(played, source))
        self.log.append(done)
        if self.stop:
            raise KeyboardInterrupt
        return done

    def _share(self, name: str, frames: int) -> int:
        """So many frames of a condition; half of them of one that counts for less than others."""
        return frames if self.judge.weights[name] >= 1 else -(-frames // 2)

    def race(self, step: str, options: Iterable[Settings]) -> list[Evaluation]:
        """All ``options`` on few frames, and the best of them on all; these, the best first."""
        return self.finals(step, self.heats(step, options), FINALISTS)

    def finals(self, step: str, begun: Sequence[Evaluation], most: int) -> list[Evaluation]:
        """Of what has seen few frames, those with a chance to win on all; the best first."""
        best = sorted(begun, key=lambda e: -e.gain.value)[:most]
        chances = []
        for one in best:
            behind, chance = best[0].gain.over(one.gain)
            if behind <= max(0.5, 2 * chance):
                chances.append(one)
        ended = [self.evaluate(step, one.settings) for one in chances]
        return sorted(ended, key=lambda e: -e.gain.value)

    def heats(self, step: str, options: Iterable[Settings]) -> list[Evaluation]:
        """All ``options`` on few frames, the best first."""
        begun = []
        for settings in options:
            try:
                begun.append(self.evaluate(step, settings, frames=self.lengths.short))
            except (ValueError, RuntimeError) as error:
                # One layer that cannot be adapted at need not keep the others from it.
                self.failed[", ".join(settings["layers"])] = str(error).partition("\n")[0]
        return sorted(begun, key=lambda e: -e.gain.value)

    # --- the steps ------------------------------------------------------------------------

    def run(self, candidates: Sequence[Candidate]) -> Evaluation:
        """The best settings that were found in the time there was."""
        try:
            self.best = self.one_layer(candidates)
            self.best = self.more_layers(self.best)
            self.best = self.transfer(self.best)
            self.best = self.statistics(self.best)
            self.best = self.other_layers(self.best)
            self.best = self.learning(self.best)
        except CutShort:
            self.cut_short = True
        if self.best is None:
            # Not even all layers were tried: the best of those that were, on as many frames.
            same = [e for e in self.log if e.frames == self.lengths.short]
            if not same:
                self.nothing()
            self.best = max(same, key=lambda e: e.gain.value)
        return self._widest(self.best)

    def nothing(self) -> NoReturn:
        """Raise what is to be said if no layer can be adapted at."""
        reasons = "; ".join(f"{name}: {why}" for name, why in self.failed.items())
        raise ValueError(f"none of the candidate layers can be adapted at. {reasons}")

    def _widest(self, best: Evaluation) -> Evaluation:
        """The same settings in all conditions, if that was played: of what remembers it was not."""
        same = [e for e in self.log if e.settings == best.settings and e.stream == "blocks"]
        return max(same, key=lambda e: e.frames, default=best)

    def one_layer(self, candidates: Sequence[Candidate]) -> Evaluation:
        """Every stage alone, then the blocks beside the best of them."""
        stages = [c.name for c in candidates if c.level == 0]
        begun = self.heats("one layer", [self.setting([name]) for name in stages])
        best = {e.layers[0] for e in begun[:NEIGHBOURHOODS]}
        order = [c.name for c in candidates]
        places = [n for n, name in enumerate(order) if name in stages]
        beside = []
        for n, name in enumerate(order):
            before = [order[place] for place in places if place < n][-1:]
            behind = [order[place] for place in places if place > n][:1]
            if name not in stages and best & {*before, *behind}:
                beside.append(name)
        begun += self.heats("one layer", [self.setting([name]) for name in beside])
        ranked = self.finals("one layer", begun, 2 * FINALISTS)
        if not ranked:
            self.nothing()
        self.say("layer", ranked[0])
        return ranked[0]

    def more_layers(self, best: Evaluation) -> Evaluation:
        """A second and a third layer, while they add more than chance."""
        singles = self.best_of("one layer", layers=1)
        partners = [e.layers[0] for e in singles[: PARTNERS + 1]]
        while len(best.layers) < min(MOST_LAYERS, len(singles)):
            others = [name for name in partners if name not in best.layers][:PARTNERS]
            ranked = self.race(
                "more layers", [self.setting([*best.layers, name]) for name in others]
            )
            if not ranked or not ranked[0].gain.beats(best.gain):
                break
            best = self.best = ranked[0]
            self.say("layers", best)
        return best

    def transfer(self, best: Evaluation) -> Evaluation:
        """ρ: how much of the transfer; the preset's unless another wins."""
        if "rho" in self.fixed:
            return best
        options = [rho for rho in RHO if rho != best.settings["rho"]]
        ranked = self.race("rho", [self.setting(best.layers, rho=rho) for rho in options])
        if ranked and ranked[0].gain.beats(best.gain):
            best = ranked[0]
        if best.gain.value < 0:
            # Nothing helps: then at least as little harm as can be.
            gentle = self.evaluate("rho", self.setting(best.layers, rho=HARMLESS_RHO))
            best = max(best, gentle, key=lambda e: e.gain.value)
        self.say("rho", best)
        return best

    def statistics(self, best: Evaluation) -> Evaluation:
        """Statistics of the image, or of the stream."""
        if "statistics_decay" in self.fixed:
            decay = self.fixed["statistics_decay"]
            return self.evaluate("fixed", self.changed(best, statistics_decay=decay), stream=LONG)
        best = self.evaluate("statistics_decay", best.settings, stream=LONG)
        usual = self.base.get("statistics_decay", 0.0)
        for decay in sorted({*STATISTICS_DECAY, usual} - {0.0}):
            settings = self.changed(best, statistics_decay=decay)
            done = self.evaluate("statistics_decay", settings, stream=LONG)
            best = self.best = done if done.gain.beats(best.gain) else best
        self.say("statistics_decay", best)
        return best

    def other_layers(self, best: Evaluation) -> Evaluation:
        """The runners-up among the layers once more, with the settings found since."""
        start = self.setting(best.layers)
        if all(best.settings[name] == start[name] for name in ("rho", "statistics_decay")):
            return best
        tried = [e for e in self.best_of("one layer", "more layers") if e.layers != best.layers]
        for other in tried[:RUNNERS_UP]:
            settings = {**best.settings, "layers": other.layers}
            done = self.evaluate("other layers", settings, stream=best.stream)
            best = done if done.gain.beats(best.gain) else best
        return best

    def learning(self, best: Evaluation) -> Evaluation:
        """γ still, or learned, and by which losses: a backward pass must earn its cost."""
        if "lr" in self.fixed:
            return self.evaluate("fixed", self.changed(best, lr=self.fixed["lr"]), stream=LONG)
        tried: list[Evaluation] = []
        for rate in LEARNING_RATES[self.profile.task]:
            try:
                tried.append(self.evaluate("lr", self.changed(best, lr=rate), stream=LONG))
            except RuntimeError as error:
                # What has no backward pass adapts all the same, with γ held still.
                self.failed["learning"] = str(error).partition("\n")[0]
                return best
            if len(tried) > 1 and tried[-2].gain.beats(tried[-1].gain):
                break  # too fast already
        fastest = max(tried, key=lambda e: e.gain.value)
        entropy = fastest.settings["lambda_entropy"]
        if "lambda_entropy" not in self.fixed and entropy:
            for share in ENTROPY_SHARES:
                changes = {"lr": fastest.settings["lr"], "lambda_entropy": share * entropy}
                if any({**fastest.settings, **changes}[name] for name in LOSSES):
                    settings = self.changed(best, **changes)
                    tried.append(self.evaluate("losses", settings, stream=LONG))
        learned = max(tried, key=lambda e: e.gain.value)
        # Without the entropy the backward pass ends at the last BeIN: cheaper.
        cheap = [e for e in tried if not e.settings["lambda_entropy"]]
        if cheap and not learned.gain.beats(cheap[0].gain):
            learned = cheap[0]
        if learned.gain.beats(best.gain, dear=True):
            best = learned
        self.say("lr", best)
        return best

    # --- looking back ---------------------------------------------------------------------

    def changed(self, best: Evaluation, **changes: Any) -> dict[str, Any]:
        """The settings of ``best``, with ``changes``."""
        return {**best.settings, **changes}

    def best_of(self, *steps: str, layers: int | None = None) -> list[Evaluation]:
        """What was tried in ``steps``, once each, on as many frames as it saw; the best first.

        Those that saw all frames come before those that were sorted out.
        """
        found: dict[tuple[str, ...], Evaluation] = {}
        for done in self.log:
            if done.step in steps and layers in (None, len(done.layers)):
                before = found.get(done.layers)
                if before is None or done.frames >= before.frames:
                    found[done.layers] = done
        return sorted(found.values(), key=lambda e: (-e.frames, -e.gain.value))

    def sure(self, best: Evaluation) -> dict[str, Any]:
        """In how many resamples the chosen layers beat the best others, other things equal.

        The same layers and more are no others: these had to win by a margin, and did not.
        """
        groups: dict[str, dict[tuple[str, ...], Evaluation]] = {}
        for done in self.log:
            rest = {k: v for k, v in plain(done.settings).items() if k != "layers"}
            key = json.dumps([rest, done.stream, done.frames], sort_keys=True)
            if done.layers == best.layers or not set(best.layers) <= set(done.layers):
                groups.setdefault(key, {})[done.layers] = done
        for group in reversed(groups.values()):
            if best.layers in group and len(group) > 1:
                ours = group.pop(best.layers)
                other = max(group.values(), key=lambda e: e.gain.value)
                difference, error = ours.gain.over(other.gain)
                wins = (ours.gain.total[1:] > other.gain.total[1:]).mean()
                return {
                    "share": round(float(wins), 3),
                    "runner_up": list(other.layers),
                    "ahead": round(difference, 3),
                    "error": round(error, 3),
                }
        return {"share": None, "runner_up": [], "ahead": None, "error": None}

    def say(self, what: str, best: Evaluation) -> None:
        """A line on what a step has found."""
        if self.progress is not None:
            value = ", ".join(best.layers) if what in ("layer", "layers") else best.settings[what]
            gain = f"{best.gain.value:+.2f} ± {best.gain.error:.2f}"
            self.progress.say(f"{what}: {value} ({gain} points over the source model)")
