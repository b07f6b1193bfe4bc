"""One run: an adapter over a stream, scored, timed, and put down so that it can go on.

Stop it any way at all and call it again: it goes on where it was, and but for times, memory and
load the record is the same to the bit as that of a run nobody stopped.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import PIL
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F

from bestta.adapters.base import StepReport
from bestta.benchmark.checkpoints import Checkpoints
from bestta.benchmark.config import Run
from bestta.benchmark.histograms import Histograms
from bestta.benchmark.memory import peak_memory
from bestta.benchmark.parts import Note, assemble, identity, load_plugins
from bestta.benchmark.passages import Answered, Passages
from bestta.benchmark.probe import Probe, default_layer
from bestta.benchmark.similarity import Similarities
from bestta.benchmark.streams import describe, digest_of_names, source_images, stream_of
from bestta.benchmark.tally import Tally, finite
from bestta.files import held, write_whole
from bestta.interrupt import stop_requests
from bestta.metrics import Metric, metric_for
from bestta.profile import ModelIdentity
from bestta.protocols import Block, Frame, Stream
from bestta.provenance import provenance
from bestta.training.scoring import normalised

KIND, FORMAT = "bestta record", 1

SAVING = 20
"""A checkpoint that takes long comes more rarely: so many times what it took."""

SAMPLED = 20
"""So many batches of each block, at least, are looked at closely: every other one is timed beside
the plain model, and of those in between the features are looked at, which takes time itself."""


class Stopped(KeyboardInterrupt):
    """A run was asked to stop, and has put down where it is."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    position: int
    total: int
    block: str
    round: int
    rounds: int
    score: float | None
    """Of the block so far."""
    milliseconds: float
    """Of a frame, adapter and all, lately."""
    seconds_left: float


Tell = Callable[[Progress], None]


def execute(
    run: Run,
    out: Path,
    *,
    tell: Tell | None = None,
    note: Note = lambda text: None,
    stopping: Callable[[], bool] = lambda: False,
    measure_memory: bool = True,
) -> Path:
    """Do a run, or the rest of it. Returns the record's path.

    Args:
        run: What to do.
        out: Where records go; what is under way lies there in a hidden folder.
        tell: Called after each batch.
        note: Called with what else takes time, in words.
        stopping: Asked after each batch; Ctrl-C and SIGTERM are heeded anyway.
        measure_memory: Whether to, in a process of its own: a few seconds.

    Raises:
        Stopped: If it was asked to stop.
        Busy: If another process is at the same run.
    """
    load_plugins(run.plugins)
    stream = stream_of(run)
    name = identity(run, stream)
    record = out / f"{name}.json"
    work = out / f".{name}"
    if record.exists() and not work.exists():
        return record
    with ExitStack() as stack:
        while True:
            work.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(held(work))
                break
            except FileNotFoundError:
                continue  # another process has just recorded it, and cleared up
        requests = stack.enter_context(stop_requests(tell=False))

        def asked() -> bool:
            return bool(requests) or stopping()

        if not record.exists():
            execution = Execution(run, out, stream, name, Checkpoints(work), asked, note)
            execution.play(tell)
            note("measuring memory")
            cost = peak_memory(run, out) if measure_memory else _UNKNOWN_MEMORY
            execution.write(record, cost)
        Checkpoints(work).clear()
        for unfinished in out.glob(f".{name}.json.*.tmp"):
            unfinished.unlink(missing_ok=True)  # of a process that was killed as it wrote
    return record


_UNKNOWN_MEMORY = {"peak_bytes": None, "over_model_bytes": None, "memory": None}


class Execution:
    """A run under way."""

    def __init__(
        self,
        run: Run,
        out: Path,
        stream: Stream,
        name: str,
        checkpoints: Checkpoints,
        stopping: Callable[[], bool] = lambda: False,
        note: Note = lambda text: None,
    ) -> None:
        self.run, self.stream, self.name, self.out = run, stream, name, out
        self.checkpoints, self.stopping, self.note = checkpoints, stopping, note
        self.began = time.monotonic()
        self.source_seconds: list[float] = []
        cv2.setNumThreads(run.threads)
        torch.manual_seed(run.seed)  # for methods that draw from it, though theirs is better
        self.parts = assemble(run, out, stopping, note)
        self.adapter = self.parts.adapter
        self.tally = Tally(self.parts.card)
        self.source = source_images(run)
        self.probe, self.similarities, self.histograms = self._instruments()
        self._resume()
        if self.tally.position:
            note(f"going on at frame {self.tally.position} of {len(stream)}")
        self.tally.sittings.append({"started": _now(), "load": _load()})
        self.commits = list(dict.fromkeys([*self.commits_before, provenance()["commit"]]))
        self.shown = self._to_show()
        self.shown_names = {stream.name_at(position) for position in self.shown}
        shown_again = (
            run.protocol.batch == 1
            and not run.protocol.redraw
            and (stream.rounds > 1 or run.protocol.recipe == "gradual")
        )
        # Rounds show the same frames: a method that remembers nothing answers each of them once.
        forgets = not self.adapter.remembers and not self.adapter.config.guard
        self.repeats = shown_again and forgets
        self.answered: dict[tuple[str, str], tuple[int, StepReport]] = {}
        self.counts: Tensor | None = None
        # One that is reset at changes comes back to where it was.
        returns = shown_again and Passages.serve(self.adapter) and not run.protocol.similarities
        self.passages = Passages(self.adapter) if returns else None

    # --- the stream -----------------------------------------------------------------------

    def play(self, tell: Tell | None) -> None:
        """Go through the frames that are left."""
        run, tally = self.run, self.tally
        began, done_before = self.began, tally.position
        saved, pause = began, run.checkpoint_seconds
        warm = False
        if self.run.protocol.forgetting and not tally.source_scores:
            self._score_source(0)
        playing = time.monotonic()
        self.source_seconds = self.source_seconds[-1:]
        before = sum(self.source_seconds)
        frames = self.stream.frames(tally.position, workers=run.workers)
        for batch in batches(frames, run.protocol.batch):
            block = batch[0].block
            self._close_blocks(before=block.index)
            last = tally.frames["block"][-1] if tally.frames["block"] else None
            if last is not None and last != block.index:
                self.adapter.domain_changed()  # even if the block's first frame is unreadable
            if last != block.index:
                self._open_block(block)
            if self.passages is not None and self.passages.repeated is not None:
                self._retrace(batch[0], self.passages)
            else:
                image = self.parts.tensor(batch)
                if not warm:
                    self._plain(image)  # the first forward of a process is slow
                    warm = True
                self._step(batch, image)
            now = time.monotonic()
            if tell is not None:
                looked = sum(self.source_seconds) - before
                seconds = now - playing - looked
                tell(self._progress(block, seconds, tally.position - done_before))
            if self.passages is not None and self.passages.repeated is not None:
                # The state is that of before the block until it is over, and so is what was saved.
                if self.stopping():
                    raise Stopped(f"{self.name}: stopped at frame {block.start}.")
                continue
            if self.stopping():
                self.save()
                raise Stopped(f"{self.name}: stopped at frame {tally.position}.")
            if now - saved >= pause:
                self.save()
                saved = time.monotonic()
                pause = max(run.checkpoint_seconds, SAVING * (saved - now))
        self._close_blocks(before=len(self.stream.blocks))
        tally.position = len(self.stream)
        self.save()

    def _step(self, batch: list[Frame], image: Tensor) -> None:
        """Predict and adapt; score, time and trace it."""
        tally, protocol = self.tally, self.run.protocol
        block = batch[0].block
        timed, counted = sampled(block, batch[0].position, protocol.batch)
        counted = counted and protocol.embeddings
        watched = protocol.similarities or counted
        before = self.answered.get((batch[0].domain, batch[0].name))
        if before is not None and not (timed or watched or batch[0].position in self.shown):
            row, report = before
            tally.trace(batch[0].position, {})
            tally.note(report)
            tally.recount(batch[0], self._counted(row))
            return
        plain_ms = self._time_plain(image) if timed else None
        plain = self.probe.plain(image) if watched and self.probe is not None else None
        self.parts.wait()
        started = time.perf_counter()
        features = None
        with self.parts.precision():
            if plain is not None and self.probe is not None:
                seen = self.probe(image)
                logits, features = seen.logits, seen.features
            else:
                logits = self.adapter(image)
        self.parts.wait()
        call_ms = 1e3 * (time.perf_counter() - started) / len(batch)
        if timed or not watched or protocol.similarities:
            tally.times["call"].append(round(call_ms, 4))
        if plain_ms is not None:
            tally.times["predict"].append(round(plain_ms / len(batch), 4))
            tally.times["adapt"].append(round(call_ms - plain_ms / len(batch), 4))
            tally.times["ratio"].append(round(call_ms * len(batch) / plain_ms, 4))

        logits = fitted(logits.float().cpu(), batch)
        values: dict[str, float | None] = dict(self.adapter.last.losses)
        values.update(self._gamma())
        spread = None
        if plain is not None and features is not None:
            if self.similarities is not None:
                values.update(self.similarities.update(plain, features, logits))
            if self.histograms is not None and counted:
                spread = self.histograms.add(batch[0].domain, plain, features)
        tally.trace(batch[0].position, values)
        tally.note(self.adapter.last)
        for frame, one in zip(batch, logits, strict=True):
            if frame.position in self.shown:
                tally.show(frame, one.argmax(0))
        found = tally.count(batch, logits)
        if self.repeats and found[0] is not None:
            self._keep_answer(batch[0], found[0])
        if self.passages is not None:
            frame, own = batch[0], found[0]
            shown = (frame.domain, frame.name) in self.shown_names
            answer = Answered(
                self.adapter.last,
                values,
                spread,
                predicted=logits[0].argmax(0).to(torch.int16) if shown else None,
                counts=None if own is None else own.counts,
            )
            self.passages.keep(frame.position - block.start, answer)

    def _keep_answer(self, frame: Frame, own: Metric) -> None:
        """Keep what a frame's answer counts, for when it is shown again.

        All of them in one block of memory: thousands of small ones, made between the large ones of
        a forward, would keep glibc from using the room of those again.
        """
        if self.counts is None:
            self.counts = own.counts.new_empty(len(self.stream), *own.counts.shape)
        row, _ = self.answered.get((frame.domain, frame.name), (len(self.answered), None))
        self.counts[row] = own.counts
        self.answered[frame.domain, frame.name] = row, self.adapter.last

    def _counted(self, row: int) -> Metric:
        assert self.counts is not None
        return self._metric_of(self.counts[row])

    def _metric_of(self, counts: Tensor) -> Metric:
        own = metric_for(self.parts.card.task, len(self.parts.card.classes))
        own.counts = counts
        return own

    def _open_block(self, block: Block) -> None:
        """See whether a block begins as an earlier one of the same frames did."""
        if self.passages is None:
            return
        positions = range(block.start, block.stop)
        self.passages.open(self.stream.name_at(position) for position in positions)
        if self.passages.repeated is not None:
            self.save()  # for it can be stopped within, but not put down

    def _retrace(self, frame: Frame, passages: Passages) -> None:
        """Count a frame as `_step` did when an equal block was played."""
        answer = passages.take(frame.position - frame.block.start)
        if answer.spread is not None and self.histograms is not None:
            self.histograms.include(frame.domain, answer.spread)
        self.tally.trace(frame.position, answer.values)
        self.tally.note(answer.report)
        if frame.position in self.shown and answer.predicted is not None:
            self.tally.show(frame, answer.predicted)
        own = None if answer.counts is None else self._metric_of(answer.counts)
        self.tally.recount(frame, own)

    def _close_blocks(self, before: int) -> None:
        """End the blocks that are over, and look at what was forgotten after each round."""
        tally = self.tally
        if len(tally.blocks) < before and self.passages is not None:
            self.passages.close()
        while len(tally.blocks) < before:
            block = self.stream.blocks[len(tally.blocks)]
            last_of_round = (
                block.index + 1 == len(self.stream.blocks)
                or self.stream.blocks[block.index + 1].round != block.round
            )
            looks = last_of_round and self.run.protocol.forgetting
            if looks:
                self.save()  # looking takes long, and may be stopped: the block is closed after it
                self._score_source(block.round + 1)
            tally.end_block(block)

    def _note_skipped(self) -> None:
        """Frames left out up to now; before each checkpoint, for no later part sees them."""
        tally = self.tally
        known = [entry["name"] for entry in tally.skipped]
        for left_out in self.stream.skipped:
            if left_out.name not in known:
                known.append(left_out.name)
                reason = _without_path(left_out.reason, self.run)
                tally.skipped.append({"name": left_out.name, "reason": reason})

    # --- what is measured beside the stream -----------------------------------------------

    def _plain(self, image: Tensor) -> None:
        with self.parts.precision():
            self.adapter.predict_source(image)
        self.parts.wait()

    def _time_plain(self, image: Tensor) -> float:
        self.parts.wait()
        started = time.perf_counter()
        self._plain(image)
        return 1e3 * (time.perf_counter() - started)

    def _gamma(self) -> dict[str, float | None]:
        gammas = [p for name, p in self.adapter.trainable.items() if "gamma_" in name]
        if not gammas:
            return {}
        every = torch.cat([p.detach().abs().flatten() for p in gammas])
        return {"gamma": float(every.max()), "gamma_mean": float(every.mean())}

    def _score_source(self, round_: int) -> None:
        """The source images, each answered by what was learned up to now; nothing is kept."""
        card = self.parts.card
        metric = metric_for(card.task, len(card.classes))
        started = time.monotonic()
        count = len(self.source or ())
        for number, sample in enumerate(self.source or (), 1):
            if self.stopping():
                if round_ == 0:
                    self.save()  # later looks are preceded by a checkpoint
                raise Stopped(f"{self.name}: stopped at frame {self.tally.position}.")
            self.note(f"looking at source images: {number} of {count}")
            if sample.label is None:
                continue
            image = normalised(sample.image[None], card.normalise).to(self.adapter.device)
            with self.adapter.trial(), self.parts.precision():
                logits = self.adapter(image).float().cpu()
            label = torch.as_tensor(np.asarray(sample.label))[None].long()
            metric.add(_resized(logits, tuple(label.shape[1:])), label)
        self.tally.source_scores.append({"round": round_, "score": finite(metric.score())})
        self.source_seconds.append(time.monotonic() - started)

    def _instruments(self) -> tuple[Probe | None, Similarities | None, Histograms | None]:
        protocol, profile = self.run.protocol, self.parts.profile
        if not (protocol.similarities or protocol.embeddings):
            return None, None, None
        if profile is None:
            raise ValueError(
                f"protocol {protocol.name!r} looks at features, and the model has no source "
                "profile to compare them with: give one, or leave them out with --no-source."
            )
        layer = protocol.layer or default_layer(profile)
        return (
            Probe(self.adapter, layer),
            Similarities(profile, layer) if protocol.similarities else None,
            Histograms(profile, layer) if protocol.embeddings else None,
        )

    def _count_source_features(self) -> None:
        if self.histograms is None or self.probe is None:
            return
        for sample in self.source or ():
            image = normalised(sample.image[None], self.parts.card.normalise)
            self.histograms.add_source(self.probe.plain(image.to(self.adapter.device)))

    def _to_show(self) -> set[int]:
        """One frame of each condition, in the last round it comes in."""
        chosen: dict[str, int] = {}
        for block in self.stream.blocks:
            if block.name == "mixed":
                for position in reversed(range(block.start, block.stop)):
                    chosen[self.stream.name_at(position)[0]] = position
            else:
                chosen[block.name] = (block.start + block.stop) // 2
        if self.run.protocol.recipe == "gradual":  # each corruption where it is strongest
            strongest = f"-{max(self.run.protocol.severities)}"
            chosen = {name: p for name, p in chosen.items() if name.endswith(strongest)}
        return set(chosen.values())

    def _progress(self, block: Block, seconds: float, done: int) -> Progress:
        each = seconds / max(1, done)
        looks = self.stream.rounds - block.round if self.run.protocol.forgetting else 0
        looking = float(np.mean(self.source_seconds)) if self.source_seconds else 0.0
        lately = self.tally.times["call"][-50:]
        return Progress(
            position=self.tally.position,
            total=len(self.stream),
            block=block.name,
            round=block.round,
            rounds=self.stream.rounds,
            score=finite(self.tally.metric.score()),
            milliseconds=float(np.median(lately or [0.0])),
            seconds_left=each * (len(self.stream) - self.tally.position) + looks * looking,
        )

    # --- down, up, and out ----------------------------------------------------------------

    def save(self) -> None:
        """Put down everything that is known so far."""
        sitting = self.tally.sittings[-1]
        sitting.update(finished=_now(), load_after=_load(), seconds=_since(self.began))
        self._note_skipped()
        place = self.checkpoints.folder / "adapter.safetensors"
        self.adapter.save(place)
        random = torch.get_rng_state().numpy().tobytes()
        blobs = {"adapter": place.read_bytes(), "random": random}
        for name, part in (("similarities", self.similarities), ("histograms", self.histograms)):
            if part is not None:
                blobs[name] = safetensors.torch.save(dict(part.tensors()))
        blobs.update({f"picture:{name}": data for name, data in self.tally.pictures.items()})
        progress = {"tally": self.tally.to_json(), "commits": self.commits}
        self.checkpoints.save(self.tally.position, progress, blobs)

    def _resume(self) -> None:
        self.commits_before: list[str | None] = []
        found = self.checkpoints.load()
        if found is None:
            self._count_source_features()
            return
        progress, blobs = found
        place = self.checkpoints.folder / "adapter.safetensors"
        write_whole(place, blobs["adapter"])
        self.adapter.load(place)
        torch.set_rng_state(torch.frombuffer(bytearray(blobs["random"]), dtype=torch.uint8))
        for name, part in (("similarities", self.similarities), ("histograms", self.histograms)):
            if part is not None:
                part.restore(safetensors.torch.load(blobs[name]))
        marked = "picture:"
        pictures = {k.removeprefix(marked): v for k, v in blobs.items() if k.startswith(marked)}
        self.tally = Tally.from_json(self.parts.card, progress["tally"], pictures)
        self.commits_before = progress["commits"]

    def write(self, path: Path, memory: dict[str, Any]) -> None:
        """The record, and the pictures it names; the pictures first."""
        run, tally, card = self.run, self.tally, self.parts.card
        about = provenance()
        about.pop("measured")
        about["commit"] = ", then ".join(str(commit) for commit in self.commits)
        about["versions"].update(opencv=cv2.__version__, pillow=PIL.__version__)
        about["machine"].update(device=self.adapter.device.type, gpu=_gpu(self.adapter.device))
        variant = run.variant
        record = {
            "kind": KIND,
            "format": FORMAT,
            "id": self.name,
            "protocol": run.protocol.name,
            "published": run.protocol.published,
            "method": run.method.method,
            "label": run.method.label,
            "told_of_changes": self.adapter.needs_domain_changes,
            "study": None
            if variant is None
            else {"name": run.study, "row": variant.row, "marks": variant.marks},
            "seed": run.seed,
            "task": card.task,
            "metric": tally.metric.name,
            "higher_is_better": tally.metric.higher_is_better,
            "classes": list(card.classes),
            "stream": {
                **describe(run, self.stream),
                "fingerprint": ModelIdentity.of(self.parts.model).fingerprint,
            },
            "config": run.resolved(),
            "settings": self.adapter.settings,
            "parameters": {
                # A method that never stepped has trained nothing, whatever it could have.
                "trained": sum(p.numel() for p in self.adapter.trainable.values())
                if tally.events["adapted"]
                else 0,
                "model": sum(p.numel() for p in self.parts.model.parameters()),
            },
            **tally.result(whole=run.protocol.similarities),
            "source_set": self._source_set(),
            "embeddings": None if self.histograms is None else self.histograms.result(),
            "provenance": about,
            "cost": self._cost(memory),
        }
        place = self.out / f"{self.name}.pictures"
        if tally.pictures:
            place.mkdir(exist_ok=True)
        for name, data in sorted(tally.pictures.items()):
            write_whole(place / name, data)
        for picture in place.iterdir() if place.exists() else ():
            if picture.name not in tally.pictures:  # of a run before, or half written
                picture.unlink()
        text = json.dumps(strict(record), indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(path, f"{compact(text)}\n".encode())

    def _source_set(self) -> dict[str, Any] | None:
        """Which source images were looked at, if any."""
        if self.source is None or self.run.protocol.source is None:
            return None
        return {
            "set": self.source.kind,
            "split": self.run.protocol.source.split,
            "images": len(self.source),
            "names": digest_of_names(self.source),
        }

    def _cost(self, memory: dict[str, Any]) -> dict[str, Any]:
        sittings, times = self.tally.sittings, self.tally.times
        return {
            **{
                f"{name}_ms": {
                    "median": float(np.median(times[name])) if times[name] else None,
                    "p95": float(np.percentile(times[name], 95)) if times[name] else None,
                    # Of a method that takes a long step now and then, only all calls tell; but
                    # for the first, which sets up what the others use.
                    "mean": float(np.mean(times[name][1:])) if times[name][1:] else None,
                }
                for name in ("call", "predict", "adapt")
            },
            "ratio": float(np.median(times["ratio"])) if times["ratio"] else None,
            # The median of frames of which few are learned from is that of the others.
            "mean_ratio": float(np.mean(times["ratio"][1:])) if times["ratio"][1:] else None,
            "timed": len(times["predict"]),
            "looked": self.run.protocol.similarities,
            **memory,
            "load": [s["load"] for s in sittings],
            "started": sittings[0]["started"],
            "finished": _now(),
            "seconds": round(sum(s.get("seconds", 0.0) for s in sittings), 3),
            "sittings": len(sittings),
        }


def sampled(block: Block, position: int, batch: int) -> tuple[bool, bool]:
    """Whether the batch at ``position`` is timed beside the plain model, and whether looked into.

    Never both, for looking takes time; but for a block that is one batch.
    """
    count = -(-len(block) // batch)
    number = (position - block.start) // batch
    turn, rest = divmod(number, max(1, count // SAMPLED))
    chosen = rest == 0
    return chosen and (turn % 2 == 0 or count == 1), chosen and (turn % 2 == 1 or count == 1)


def batches(frames: Iterable[Frame], size: int) -> Iterator[list[Frame]]:
    """Frames in lists of ``size`` at most, each of one block and of images of one size."""
    batch: list[Frame] = []
    for frame in frames:
        if batch and (
            len(batch) == size
            or batch[0].block != frame.block
            or batch[0].image.shape != frame.image.shape
        ):
            yield batch
            batch = []
        batch.append(frame)
    if batch:
        yield batch


def fitted(logits: Tensor, batch: list[Frame]) -> Tensor:
    """Logits at the size of the labels: some models answer at a quarter of it."""
    return logits if logits.dim() == 2 else _resized(logits, batch[0].image.shape[:2])


def _resized(logits: Tensor, size: tuple[int, ...]) -> Tensor:
    if logits.dim() == 2 or tuple(logits.shape[-2:]) == tuple(size):
        return logits
    return F.interpolate(logits, size=list(size), mode="bilinear", align_corners=False)


def compact(text: str) -> str:
    """Indented JSON with each list of plain values on one line: for people and for diffs."""

    def joined(found: re.Match[str]) -> str:
        return re.sub(r"\s*\n\s*", " ", found.group(0)).replace("[ ", "[").replace(" ]", "]")

    # A line break never stands inside a string: what begins with one is a list.
    return re.sub(r"\[\n[^\[\]{}\"]*\]", joined, text)


def strict(value: Any) -> Any:
    """The same with words for what JSON has no numbers for: a setting may be infinite.

    >>> strict({"prior": float("inf"), "weights": [0.5, 1]})
    {'prior': 'inf', 'weights': [0.5, 1]}
    """
    if isinstance(value, dict):
        return {key: strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [strict(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _gpu(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _without_path(reason: str, run: Run) -> str:
    """A reason without the folder that it was found in, which is this machine's own."""
    options = [str(value) for value in run.protocol.options.values()]  # a folder of labels, say
    roots = [run.data, run.source_data, *(value for value in options if "/" in value)]
    for root in filter(None, roots):
        for spelt in (root, str(Path(root).expanduser().resolve())):
            reason = reason.replace(f"{spelt.rstrip('/')}/", "")
    return reason
