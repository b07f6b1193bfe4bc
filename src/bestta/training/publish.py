"""From a finished training to a model that others can use: weights, profile, card, curves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bestta.data.samples import ImageSet
from bestta.data.tensors import to_batches
from bestta.files import held
from bestta.metrics import MeanIoU, metric_for
from bestta.models.cards import PROFILE, WEIGHTS, Card, load, save_weights, sha256
from bestta.profile import SourceProfile
from bestta.progress import Progress, span
from bestta.training.curves import curves
from bestta.training.loop import Training
from bestta.training.recipes import Recipe
from bestta.training.scoring import score
from bestta.training.shift import SEVERITIES, Shift

CURVES = "curves.svg"
_PROFILED = {"segmentation": 500, "classification": 5000}
"""So many training images go into the profile."""
_STORED_TOLERANCE = 0.1
"""So far, in points, the score of the stored weights may be from that of the trained ones."""
_HARDLY = 1e-5
"""A class with a smaller share of the labelled test pixels is an accident, and noted as one."""


def publish(training: Training, *, command: str, show: bool = True) -> Card:
    """Write a finished training as a model: ``bestta.models.load(training.folder)`` takes it.

    The test images are scored here, once: with the weights as trained and as stored, which must
    agree.

    Args:
        training: One that is done.
        command: What the user typed, for the card.
        show: Whether to show progress.
    """
    if not training.done:
        raise ValueError(
            f"training has come {training.epoch:.1f} of {training.recipe.epochs} epochs: "
            "finish it first."
        )
    with held(training.folder):
        return _publish(training, command, show)


def _publish(training: Training, command: str, show: bool) -> Card:
    recipe, folder, test = training.recipe, training.folder, training.splits.test
    save_weights(training.model, folder / WEIGHTS)
    model = recipe.build()
    card = Card(
        name=recipe.name,
        about=recipe.about,
        network=recipe.network,
        arguments=recipe.arguments,
        task=recipe.task,
        classes=recipe.classes,
        normalise=(tuple(recipe.normalise[0]), tuple(recipe.normalise[1])),
        size=recipe.size,
        layers=recipe.layers,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        data=recipe.data,
        terms=recipe.terms,
        command=command,
        recipe=recipe.settings(),
        metric=metric_for(recipe.task, len(recipe.classes)).name,
        notes=(*recipe.notes, *_missing(test)),
        history={**_history(training), "origin": training.origin, "sittings": training.sittings},
        sha256={WEIGHTS: sha256(folder / WEIGHTS)},
    )
    _write(card, folder)
    model = load(folder)

    with Progress(f"{recipe.name}: test images", 2 * len(test), show=show) as progress:
        trained = score(training.model, test, recipe, progress=progress).score()
        metric = score(model, test, recipe, progress=progress)
    if abs(metric.score() - trained) > _STORED_TOLERANCE:
        raise ValueError(
            f"the weights as stored score {metric.score():.2f}, as trained {trained:.2f}: "
            "fp16 does not hold them."
        )
    profile = _profile(model, recipe, training.splits.train, show)
    profile.save(folder / PROFILE)
    clean: dict[str, Any] = {"clean": metric.score(), "clean_as_trained": trained}
    if isinstance(metric, MeanIoU):
        clean["per_class"] = dict(zip(recipe.classes, metric.per_class(), strict=True))
        card = replace(card, notes=(*card.notes, *_hardly_there(metric, recipe.classes)))
    files = {file: sha256(folder / file) for file in (WEIGHTS, PROFILE)}
    card = replace(card, scores=clean, layers=tuple(profile.layers), sha256=files)
    _write(card, folder)
    return card


def _profile(model: nn.Module, recipe: Recipe, train: ImageSet, show: bool) -> SourceProfile:
    profile = SourceProfile.collect(
        model,
        _plain_batches(train, _PROFILED[recipe.task], recipe.normalise),
        recipe.layers,
        note=f"training images of {recipe.name}",
        progress=show,
    )
    layers = {"bestta": recipe.default_layers}
    layers |= {f"bestta-{form}": chosen for form, chosen in recipe.form_layers.items()}
    return replace(profile, settings={form: {"layers": list(c)} for form, c in layers.items()})


def renew_profile(folder: Path, recipe: Recipe, train: ImageSet, *, show: bool = True) -> Card:
    """Collect the profile of a published model anew: for what older versions did not keep."""
    profile = _profile(load(folder), recipe, train, show)
    profile.save(folder / PROFILE)
    card = Card.read(folder)
    files = {**card.sha256, PROFILE: sha256(folder / PROFILE)}
    card = replace(card, layers=tuple(profile.layers), sha256=files)
    _write(card, folder)
    return card


def _history(training: Training) -> dict[str, Any]:
    history = asdict(training.history)
    del history["recent"]
    return history


def published(folder: Path) -> bool:
    """Whether `publish` came to its end here, and its files are still those that it wrote."""
    try:
        files = Card.read(folder).sha256
        return PROFILE in files and all(
            sha256(folder / file) == expected for file, expected in files.items()
        )
    except (ValueError, OSError):
        return False


def add_shift(folder: Path, shift: Shift) -> Card:
    """Put the scores under corruptions and in weather on the card in ``folder``."""
    card = Card.read(folder)
    scores = {
        **card.scores,
        "images": shift.images,
        "precision": shift.precision,
        f"clean_in_{shift.precision}": shift.clean,
        "corruptions": shift.corruptions,
        "weather": shift.weather,
        "sittings": shift.provenance.get("sittings", []),
    }
    card = replace(card, scores=scores)
    _write(card, folder)
    return card


def _write(card: Card, folder: Path) -> None:
    (folder / CURVES).write_text(curves(card), encoding="utf-8")
    card.write(folder, readable(card))


def _plain_batches(images: ImageSet, count: int, normalise: Any) -> Iterator[Tensor]:
    """``count`` training images spread over the set, as they are scored: not altered."""
    return to_batches(images.some(count), 8, normalise)


def _missing(test: ImageSet) -> tuple[str, ...]:
    """What the test images lack of the published ones: their scores do not compare."""
    phrases = [phrase for phrase in test.missing() if not phrase.startswith("split ")]
    return (f"The test images lack {' and '.join(phrases)}.",) if phrases else ()


def _hardly_there(metric: MeanIoU, classes: Sequence[str]) -> tuple[str, ...]:
    """Classes with next to no pixels, which count as much in the mean as the road, and without."""
    labelled = metric.counts.sum(1).tolist()
    rare = [c for c, pixels in enumerate(labelled) if 0 < pixels < _HARDLY * sum(labelled)]
    if not rare:
        return ()
    named = " and ".join(f"class '{classes[c]}' (pixels: {labelled[c]:,})" for c in rare)
    others = metric.score(only=[c for c in range(metric.classes) if c not in rare])
    return (
        f"The test images have next to none of {named}, an accident of the labels that counts in "
        f"the mean like any class. Without: {others:.2f}.",
    )


def readable(card: Card) -> str:
    """The card as Markdown."""
    scores = card.scores
    better = "higher" if metric_for(card.task, 1).higher_is_better else "lower"
    width, height = card.size
    lines = [
        f"# {card.name}",
        "",
        f"{card.about}. {card.parameters / 1e6:.2f} million parameters.",
        "",
        "```python",
        f'name = "{card.name}"  # the one that ships; for one of your own, the folder of this card',
        "model = bestta.models.load(name)",
        "profile = bestta.models.load_profile(name)",
        "normalise = bestta.models.card(name).normalise",
        "```",
        "",
        "| | |",
        "| --- | --- |",
        f"| data | {card.data} |",
        f"| terms | **{card.terms}** |",
        f"| task | {card.task}, {len(card.classes)} classes, {width}x{height} pixels |",
        f"| profile | {', '.join(f'`{layer}`' for layer in card.layers)} |",
        f"| training | {_training(card)} |",
        f"| command | `{card.command}` |",
        *(f"| SHA-256 of {file} | `{digest}` |" for file, digest in card.sha256.items()),
        "",
    ]
    if "clean" in scores:
        lines += [
            "## Scores, left alone",
            "",
            f"{card.metric} in percent, {better} is better. Clean test images: "
            f"**{scores['clean']:.2f}**"
            + (f" ({scores['images']:,} images)." if "images" in scores else "."),
            "",
        ]
        lines += [note + "\n" for note in card.notes]
    if "precision" in scores:
        precision = scores["precision"]
        lines += [
            f"Computed in fp32; below in {precision}, in which the clean images score "
            f"{scores[f'clean_in_{precision}']:.2f}."
            if precision != "fp32"
            else "Computed in fp32.",
            "",
        ]
    for table, title in (("weather", "simulated weather"), ("corruptions", "corruption")):
        if scores.get(table):
            lines += _table(title, scores[table])
    if scores.get("per_class"):
        lines += ["IoU by class on the clean images: " + _per_class(scores["per_class"]), ""]
    if card.recipe:
        lines += ["## Recipe", "", _recipe(card.recipe), ""]
    lines += ["## Training", "", "![loss and held-out score](curves.svg)", ""]
    return "\n".join(lines)


def _training(card: Card) -> str:
    sittings = card.history.get("sittings", [])

    def seen(*path: str) -> str:
        values = []
        for sitting in sittings:
            value: Any = sitting
            for key in path:
                value = value.get(key, "?") if isinstance(value, dict) else "?"
            values.append(str(value))
        return ", ".join(dict.fromkeys(values)) or "?"

    origin = card.history.get("origin")
    dirty = any(str(sitting.get("commit")).endswith("-dirty") for sitting in sittings)
    return (
        f"{card.recipe.get('epochs')} epochs, {span(card.history.get('seconds', 0))} on "
        f"{seen('device')} with {seen('machine', 'threads')} thread(s) in {len(sittings)} "
        f"sitting(s); commit {seen('commit')}"
        + (" (dirty: with changes that were not committed)" if dirty else "")
        + f", torch {seen('versions', 'torch')}"
        + (f"; encoder from {origin}" if origin else "")
    )


def _table(title: str, rows: Mapping[str, list[float | None]]) -> list[str]:
    lines = [
        f"| {title} | " + " | ".join(map(str, SEVERITIES)) + " |",
        "| --- |" + " ---: |" * len(SEVERITIES),
    ]
    columns: Iterable[tuple[float | None, ...]] = zip(*rows.values(), strict=True)
    means = [sum(c) / len(c) if None not in c else None for c in columns]  # type: ignore[arg-type]
    for name, values in [*rows.items(), ("mean", means)]:
        lines.append(f"| {name} | " + " | ".join(map(_figure, values)) + " |")
    return [*lines, ""]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _per_class(ious: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {_figure(iou)}" for name, iou in ious.items()) + "."


def _recipe(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value}"
        for name, value in settings.items()
        if name not in ("name", "classes", "task") and value not in ("", None)
    )
