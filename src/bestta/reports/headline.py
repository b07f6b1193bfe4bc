"""What a group of records says, in a few sentences made from its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from bestta.reports.comparable import is_looked_at
from bestta.reports.figures import PLAIN, Shown, megabytes, metric_of, milliseconds
from bestta.reports.figures_scores import row_names
from bestta.reports.notes import bound
from bestta.reports.records import ordinal

TENTH = 0.05
"""Differences below this are shown as 0.0, and are not spoken of as differences."""


def headline(shown: Sequence[Shown]) -> list[str]:
    """Sentences, the most important first: who is best, by how much, at what cost, for how long.

    The order is that of the scores shown; differences are over the seeds that both sides have.
    """
    return [bound(sentence) for sentence in _headline(shown)]


def _headline(shown: Sequence[Shown]) -> list[str]:
    metric, up = metric_of(shown)
    scored = _best_first(shown)
    if not scored:
        return [f"No method has a {metric} here: no block could be scored."]
    if len(scored) == 1:
        (one,) = scored
        said = [
            f"{one.label}: {one.score:.1f} % mean {metric}. It is the only method with a score on "
            "this stream, so there is nothing to compare it with."
        ]
        return [*said, *_cost(one, None)]
    source = next((one for one in scored if one.method == PLAIN), None)
    best = scored[0]
    tied = [one for one in scored if _below(one, best, up) < TENTH]
    said = [_winner(scored, tied, source, metric, up), *_ours(scored, tied, source, up)]
    said += _losers(scored, tied, source, up) + _other_seeds(scored)
    about = best if best is not source else next((o for o in scored if o.entry.highlighted), best)
    said += _cost(about, source) + _course(scored, up) + _doubt(scored, up)
    return said


def study_headline(shown: Sequence[Shown]) -> list[str]:
    """The same for the rows of a study: which is best, and how much the rows matter."""
    return [bound(sentence) for sentence in _study_headline(shown)]


def _study_headline(shown: Sequence[Shown]) -> list[str]:
    metric, up = metric_of(shown)
    scored = _best_first(shown)
    if not scored:
        return [f"No row has a {metric} here: no block could be scored."]
    called = row_names(scored)
    best, last = scored[0], scored[-1]
    if best is last:
        return [f"One row has been run: {called[best.label]}, {best.score:.1f} % mean {metric}."]
    tied = [one for one in scored if _below(one, best, up) < TENTH]
    gap = _gap(last, best, up)
    worth = "" if gap is None else f": the choice is worth {gap:.1f} points here"
    names = _listed([called[one.label] for one in tied])
    return [
        f"Best of {len(scored)} rows: {names}, with {best.score:.1f} % mean {metric}. "
        f"The last, {called[last.label]}, has {last.score:.1f} %{worth}.",
        *_other_seeds(scored),
        *_doubt(scored, up),
    ]


def _best_first(shown: Sequence[Shown]) -> list[Shown]:
    """Those that have a score, in the metric's order."""
    _, up = metric_of(shown)
    scored = [one for one in shown if one.score is not None]
    return sorted(scored, key=lambda one: (one.score or 0.0) * (-1 if up else 1))


def _gap(one: Shown, other: Shown, up: bool) -> float | None:
    """By how many points ``one`` is worse than ``other``, over the seeds both have, if any."""
    return other.entry.lead(one.entry, higher_is_better=up)


def _below(one: Shown, other: Shown, up: bool) -> float:
    """By how many points the score shown for ``one`` is worse than that for ``other``."""
    return ((other.score or 0.0) - (one.score or 0.0)) * (1 if up else -1)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _winner(
    scored: Sequence[Shown], tied: Sequence[Shown], source: Shown | None, metric: str, up: bool
) -> str:
    best, most = scored[0], "highest" if up else "lowest"
    if source in tied:
        rest = [one for one in scored if one not in tied]
        said = (
            f"No method improves on the source model: left alone it has {best.score:.1f} % "
            f"mean {metric}"
        )
        others = [one.label for one in tied if one is not source]
        if others:
            return f"{said}, and so {'has' if len(others) == 1 else 'have'} {_listed(others)}."
        gap = _gap(rest[0], best, up)
        if gap is None:
            return f"{said}. The next is {rest[0].label}, with {rest[0].score:.1f} %."
        return f"{said}, {_points(gap, 'better', 'worse')} than the next, {rest[0].label}."
    if len(tied) > 1:
        names = _listed([one.label for one in tied])
        said = f"{names} share the {most} mean {metric}, {best.score:.1f} %"
    else:
        said = f"{best.label} has the {most} mean {metric}, {best.score:.1f} %"
    if source is None:
        gap = _gap(scored[1], best, up)
        if len(tied) == 1 and gap is not None:
            said += f", {_points(gap, 'ahead of', 'behind')} {scored[1].label}"
        return f"{said}. The source model was not run here."
    gap = _gap(source, best, up)
    there = f"the source model without adaptation ({source.score:.1f} %)"
    if gap is None:
        return f"{said}; {there} was run with other seeds."
    ways = ("above", "below") if up else ("below", "above")
    return f"{said}: {_points(gap, *ways)} {there}."


def _points(gap: float, ahead: str, behind: str) -> str:
    """A difference in words; over fewer seeds it may be the other way round."""
    return f"{abs(gap):.1f} points {ahead if gap >= 0 else behind}"


def _ours(
    scored: Sequence[Shown], tied: Sequence[Shown], source: Shown | None, up: bool
) -> list[str]:
    """Where our method stands when it does not stand first."""
    ours = next((one for one in scored if one.entry.highlighted), None)
    if ours is None or ours in tied:
        return []
    place = 1 + sum(_below(one, ours, up) < -TENTH for one in scored)
    said = f"{ours.label} comes {ordinal(place)} of {len(scored)}"
    behind = _gap(ours, scored[0], up)
    if behind is not None:
        said += f", {_points(behind, 'behind', 'ahead')}"
    if source is not None and source is not scored[0]:
        gain = _gap(source, ours, up)
        if gain is not None and abs(gain) >= TENTH:
            joint = "," if behind is None else " and"
            said += f"{joint} {_points(gain, 'better', 'worse')} than the source"
    return [f"{said}."]


def _losers(
    scored: Sequence[Shown], tied: Sequence[Shown], source: Shown | None, up: bool
) -> list[str]:
    """Methods that adapting made worse than not adapting."""
    if source is None or source in tied:
        return []
    worse = [
        (one.label, gap)
        for one in scored
        if not one.entry.highlighted and (gap := _gap(one, source, up)) is not None and gap >= TENTH
    ]
    if not worse:
        return []
    names = _listed([f"{label} ({gap:.1f})" for label, gap in worse])
    verb = "does" if len(worse) == 1 else "do"
    return [f"{names} {verb} worse than no adaptation, by the points in brackets."]


def _cost(one: Shown, source: Shown | None) -> list[str]:
    time = one.mean("cost", "call_ms", "median")
    if time is None:
        return []
    said = f"With {one.label} an image takes {milliseconds(time)} (median)"
    said += ", looking at features included" if is_looked_at(one.first) else ""
    # Within its own run: processes that ran at other times had other neighbours.
    plain = one.mean("cost", "predict_ms", "median")
    ratio = one.mean("cost", "ratio") or (time / plain if plain else None)
    if ratio is not None and one is not source:
        said += f", {ratio:.1f} times the plain model's forward on the same images"
    over = one.mean("cost", "over_model_bytes")
    if over is not None:
        said += f", and {megabytes(over)} of memory on top of the model"
    trained = one.mean("parameters", "trained")
    if trained is not None and one.method != PLAIN:
        said += f"; it trains {trained:,.0f} parameters"
        whole = one.mean("parameters", "model")
        if whole and trained:
            said += f", {100 * trained / whole:.2g} % of the model's"
    return [f"{said}."]


def _course(scored: Sequence[Shown], up: bool) -> list[str]:
    """What the first and the last round tell of the best and of the one that changes most."""
    changes = {}
    for one in scored:
        rounds = one.entry.round_scores
        if len(rounds) > 1 and rounds[0] is not None and rounds[-1] is not None:
            changes[one.label] = (rounds[-1] - rounds[0]) * (1 if up else -1)
    if not changes:
        return []
    best = scored[0].label
    said = [f"{best} {_change(changes[best])}"] if best in changes else []
    worst = min(changes, key=lambda label: changes[label])
    if worst != best and changes[worst] <= -1:
        said.append(f"{worst} {_change(changes[worst])}")
    return [f"From the first round to the last, {_listed(said)}."] if said else []


def _change(points: float) -> str:
    if abs(points) < TENTH:
        return "stays as it is"
    return f"{'gains' if points > 0 else 'loses'} {abs(points):.1f} points"


def _other_seeds(scored: Sequence[Shown]) -> list[str]:
    """Why differences may not be those of the scores shown."""
    if len({tuple(one.entry.seeds) for one in scored}) == 1:
        return []
    return ["Seeds differ: differences are over those that both sides have."]


def _doubt(scored: Sequence[Shown], up: bool) -> list[str]:
    """Whether chance could have made the order."""
    best, second = scored[0], scored[1]
    spreads = [one.entry.spread for one in (best, second)]
    known = [spread for spread in spreads if spread is not None]
    called = row_names(scored)
    single = [called[one.label] for one in scored if len(one.entry.seeds) == 1]
    if len(single) == len(scored):
        return ["All were run with one seed: small differences may be chance."]
    said = []
    if single:
        said.append(
            f"Some were run with one seed: {_listed(single)}. Small differences may be chance."
        )
    gap = _gap(second, best, up)
    if known and (_below(second, best, up) if gap is None else gap) < max(known):
        said.append(
            f"The lead over the second ({called[second.label]}) is smaller than the spread over "
            f"seeds (± {max(known):.1f} points): it may be chance."
        )
    return said
