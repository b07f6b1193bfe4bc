"""What is run: a protocol, methods, and the settings of both, from small YAML files.

A protocol's file says which images come in which order and which model sees them; a method's file
says how a method is set. Both hold only what differs from the defaults below, and open with the
command that runs them. `bestta bench` finds those in ``configs/`` by name; any other by its path.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from bestta.adapters.registry import method_class
from bestta.benchmark.subjects import card_of, import_file
from bestta.data import kinds
from bestta.data.corruptions import CORRUPTIONS, EXTRA
from bestta.data.weather import CONDITIONS
from bestta.models import names as model_names
from bestta.protocols.recipes import UP_AND_DOWN

SHIPPED = (Path(__file__).parents[1] / "configs", Path(__file__).parents[3] / "configs")
"""Where the files are that come with the library: in a wheel, and in the repository."""

_SINGULAR = {"protocols": "protocol", "methods": "method", "studies": "study"}

CLEAR = "clear"
"""The condition in which nothing is done to the images."""


SHOWN = ("acdc", "cifar10c")
"""The sets whose images show conditions of their own."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source images, to see what has been forgotten and how their features are distributed."""

    set: str | None = None
    """A kind of set; that of the stream if none."""
    split: str | None = None
    images: int = 20
    """So many of them, spread over the set."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of a study: a method with settings of its own."""

    method: str
    label: str = ""
    row: str = ""
    """What the study's table calls it, such as ``(a)``."""
    marks: dict[str, bool | int | float | str] = field(default_factory=dict)
    """What is on and what is off in it, or the value that varies."""
    settings: dict[str, Any] = field(default_factory=dict)
    batch: int | None = None
    """Images at a time, where the study is about that."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Which images, in which order, and which model sees them."""

    name: str
    about: str = ""
    """One line for ``bestta bench``'s list."""
    recipe: Literal["continual", "gradual", "mixed"] = "continual"
    """The conditions in turn; each swelling and fading; or all mixed."""
    set: str = "streets"
    """The kind of set; ``bestta data list`` names them."""
    split: str | None = None
    """Or ``held-out``: the training images that the model was never trained on."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else the reader of the set takes, such as ``ignore_fringes: true``."""
    size: tuple[int, int] | None = None
    """(width, height) that images are resized to; as they are if none."""
    images: int | None = None
    """So many of each condition, spread over the set; all if none."""
    effect: Literal["weather", "corruptions", "photographs"] = "weather"
    """What brings the conditions about; photographs show them as they are."""
    conditions: tuple[str, ...] = CONDITIONS
    """In this order; ``clear`` leaves images as they are."""
    severity: int = 3
    severities: tuple[int, ...] = UP_AND_DOWN
    """Of a gradual protocol: those each corruption goes through."""
    family: Literal["imagenet", "cifar"] = "imagenet"
    """Whose constants corruptions take."""
    rounds: int = 1
    shuffle: bool = False
    redraw: bool = False
    """Whether each round draws its weather anew."""
    model: str = "streets"
    """A model that ships, the folder of one, or a Python file with one (see `Subject`)."""
    batch: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    every: int = 1
    """Every so-many-th frame of each block is scored and adapted to; the others are left out."""
    source: Source | None = None
    """Source images, if any are to be looked at."""
    forgetting: bool = False
    """Score the source images before the stream and after every round."""
    similarities: bool = False
    """Trace direction, target and source similarity at ``layer`` on every step."""
    embeddings: bool = False
    """Count how features at ``layer`` are distributed: source, target and adapted."""
    layer: str | None = None
    """Where to look; the last layer of the model's profile if none."""
    published: str | None = None
    """The published table that stands beside the measured one."""
    methods: tuple[str, ...] = ("source", "bestta")
    """What runs if no method is named."""

    def __post_init__(self) -> None:
        def wrong(text: str) -> ValueError:
            return ValueError(f"protocol {self.name!r}: {text}")

        source = self.source or Source()
        for kind in (self.set, source.set or self.set):
            if kind not in kinds():
                raise wrong(unknown("kind of set", kind, kinds()))
        if source.images < 1:
            raise wrong(f"source: images must be 1 or more, not {source.images}.")
        known = (*CONDITIONS, CLEAR) if self.effect == "weather" else (*CORRUPTIONS, *EXTRA, CLEAR)
        for name in self.conditions:
            if self.effect != "photographs" and name not in known:
                raise wrong(unknown("condition", name, known))
        if not self.conditions:
            raise wrong("there must be a condition at least.")
        if self.recipe == "gradual" and self.effect != "corruptions":
            raise wrong(f"a gradual stream is made of corruptions, not of {self.effect}.")
        if self.shuffle and self.recipe != "continual":
            raise wrong(f"shuffle is for continual streams; this is {self.recipe}.")
        if self.redraw and self.recipe == "gradual":
            raise wrong("a gradual stream is one round: there is nothing to redraw.")
        if self.family != "imagenet" and self.effect != "corruptions":
            raise wrong(f"family is for corruptions; the effect is {self.effect}.")
        if self.recipe == "gradual" and self.rounds != 1:
            raise wrong(f"a gradual stream is one round of severities, not {self.rounds}.")
        if self.effect == "photographs" and self.set not in SHOWN and len(self.conditions) > 1:
            raise wrong(
                f"{self.set} has one condition, as it is; {', '.join(SHOWN)} have several. "
                "With 'effect: weather' or 'corruptions' they are rendered."
            )
        for name in ("rounds", "batch", "every", "images", "severity"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise wrong(f"{name} must be 1 or more, not {value}.")
        if any(not 1 <= s <= 5 for s in (self.severity, *self.severities)):
            raise wrong("severities go from 1 to 5.")
        if self.size is not None and min(self.size) < 1:
            raise wrong(f"size is width and height, such as [512, 256], not {list(self.size)}.")
        if (self.forgetting or self.embeddings) and self.source is None:
            raise wrong("forgetting and embeddings look at source images: say which, in 'source'.")
        place = Path(self.model)
        own = place.is_file() if place.suffix == ".py" else place.is_dir()
        if self.model not in model_names() and not own:
            known_models = unknown("model", self.model, model_names())
            raise wrong(f"{known_models} Or name the folder of one, or a Python file.")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Variants that are compared over a protocol: an ablation, a sweep."""

    name: str
    about: str = ""
    published: str | None = None
    """The published table of the same study; ``protocol`` for that of the protocol."""
    task: Literal["segmentation", "classification"] | None = None
    """What its variants make sense for; both if none."""
    changes: dict[str, Any] = field(default_factory=dict)
    """What of the protocol is otherwise."""
    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        if not self.variants:
            raise ValueError(f"study {self.name!r}: there must be a variant at least.")

    def only(self, rows: Sequence[str]) -> Study:
        """The same study with some of its rows: by label, by row such as ``(a)``, or by method."""
        known = {name: None for v in self.variants for name in _names(v)}
        for name in rows:
            if name not in known:
                raise ValueError(unknown(f"row of the study {self.name!r}", name, known))
        chosen = [v for v in self.variants if not {*rows}.isdisjoint(_names(v))]
        return replace(self, variants=tuple(chosen))


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What a method learns from source images before the stream begins."""

    images: int | None = 500
    """So many training images, spread over the set; all if none."""
    batch: int = 8
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("images", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"prepare: {name} must be 1 or more, not {value}.")


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a method is set."""

    method: str
    label: str = ""
    """What tables call it; the method's name if empty."""
    preset: str | None = None
    """A form of the method other than its usual one, such as ``paper``."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from its defaults."""
    prepare: Preparation = field(default_factory=Preparation)
    """Only for those that learn from source images first."""

    def __post_init__(self) -> None:
        known = method_class(self.method)
        if self.preset is not None and self.preset not in known.forms:
            raise ValueError(unknown(f"preset of {self.method!r}", self.preset, known.forms))
        names = [f.name for f in fields(known.Config)]
        for name in (*self.settings, *self.prepare.settings):
            if name not in names:
                raise ValueError(unknown(f"setting of {self.method!r}", name, names))
        if not self.label:
            object.__setattr__(self, "label", self.method)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One method over one protocol with one seed: what becomes one record.

    Attributes:
        data: Folder of the set; no part of what the run is, for it differs between machines.
        source_data: Folder of the source images, if that is another one.
        threads: Of PyTorch.
        device: Where to compute.
        workers: Processes that render frames ahead.
        checkpoint_seconds: How often what is done so far is put down.
        plugins: Python files that are imported first: methods of your own.
    """

    protocol: Protocol
    method: Method
    study: str | None = None
    variant: Variant | None = None
    seed: int = 0
    threads: int = 1
    device: str = "cpu"
    data: str | None = None
    source_data: str | None = None
    workers: int = 0
    checkpoint_seconds: float = 20.0
    plugins: tuple[str, ...] = ()

    def resolved(self) -> dict[str, Any]:
        """Everything that decides the result, as JSON has it: the config of the record."""
        protocol = asdict(self.protocol)
        for name in ("about", "methods"):
            protocol.pop(name)  # they say what else there is to run
        method = asdict(self.method)
        if method_class(self.method.method).Preparation is None:
            method.pop("prepare")
        if self.method.preset is None:
            method.pop("preset")
        if self.protocol.model not in model_names():
            protocol["model"] = Path(self.protocol.model).name
        protocol["options"] = portable(self.protocol.options)
        return cast(
            dict[str, Any],
            json.loads(
                json.dumps(
                    {
                        "protocol": protocol,
                        "method": method,
                        "study": self.study,
                        "variant": None if self.variant is None else asdict(self.variant),
                        "seed": self.seed,
                        "threads": self.threads,
                        "device": self.device,
                        "plugins": [Path(path).name for path in self.plugins],
                    }
                )
            ),
        )

    def to_json(self) -> str:
        """All of it, paths included, to be handed to another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Run:
        """What `to_json` wrote; the plugins are imported, for the method may be theirs."""
        values = json.loads(text)
        for path in values.get("plugins", ()):
            import_file(path)
        return built(cls, values, "run")


Built = TypeVar("Built")


def read_protocol(name: str | Path, **changes: Any) -> Protocol:
    """The protocol in a file, or of a name; ``changes`` win over what the file says."""
    path = _found(name, "protocols")
    return built(Protocol, {"name": path.stem, **_yaml(path)} | changes, str(name))


def read_method(name: str | Path, **settings: Any) -> Method:
    """The method in a file, or of a name; ``settings`` win over what the file says.

    A method without a file, such as one of your own, runs with its defaults.
    """
    try:
        path = _found(name, "methods")
    except ValueError as missing:
        try:
            method_class(str(name))
        except ValueError:
            raise missing from None
        values: dict[str, Any] = {"method": str(name)}
    else:
        values = _yaml(path)
    method = built(Method, values, str(name))
    return replace(method, settings={**method.settings, **settings})


def read_study(name: str | Path, *, within: tuple[Path, ...] = ()) -> Study:
    """The study in a file, or of a name; ``like: OTHER`` puts the other's variants first.

    Nothing but its variants: what it changes and what stands beside it is said anew.
    """
    path = _found(name, "studies")
    if path in within:
        raise ValueError(f"study {path.stem!r} is said to be like itself.")
    values = _yaml(path)
    other = values.pop("like", None)
    if other is not None:
        other = _as(str, other, f"{name}: like")
        beside = path.parent / other
        of = read_study(
            beside if beside.suffix and beside.is_file() else other, within=(*within, path)
        )
        own = values.get("variants") or []
        if not isinstance(own, list):
            raise ValueError(f"{name}: variants is {own!r}; expected a list.")
        values["variants"] = [*of.variants, *own]
    return built(Study, {"name": path.stem, **values}, str(name))


def shipped(what: str) -> list[str]:
    """Names of the ``protocols``, ``methods`` or ``studies`` that come with the library."""
    return sorted({p.stem for folder in SHIPPED for p in (folder / what).glob("*.yaml")})


def runs(
    protocol: Protocol,
    methods: Sequence[Method] | None = None,
    *,
    study: Study | None = None,
    seeds: int = 1,
    **common: Any,
) -> list[Run]:
    """The runs of a protocol: the variants of a study, the methods named, or the protocol's own.

    Args:
        protocol: What they run over; a study may change some of it.
        methods: Which.
        study: What to compare instead.
        seeds: Each of them with seeds 0, 1, … so many.
        **common: What else a `Run` takes.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, not {seeds}.")
    if study is not None and methods is not None:
        raise ValueError("a study has its own methods: name a study or methods, not both.")
    if study is None:
        found = [read_method(name) for name in protocol.methods] if methods is None else methods
        chosen = [Run(protocol=protocol, method=method, **common) for method in found]
    else:
        chosen = [_variant_run(protocol, study, variant, common) for variant in study.variants]
    return [replace(run, seed=seed) for seed in range(seeds) for run in chosen]


def _variant_run(protocol: Protocol, study: Study, variant: Variant, common: dict[str, Any]) -> Run:
    task = card_of(protocol.model).task
    if study.task not in (None, task):
        raise ValueError(
            f"study {study.name!r} is one of {study.task}; {protocol.model} does {task}."
        )
    method = read_method(variant.method, **variant.settings)
    changes = dict(study.changes)
    if study.published != "protocol":
        changes.setdefault("published", study.published)
    if variant.batch is not None:
        changes["batch"] = variant.batch
    return Run(
        protocol=built(Protocol, _shallow(protocol) | changes, f"study {study.name!r}"),
        method=replace(method, label=variant.label or f"{method.label} {variant.row}".strip()),
        study=study.name,
        variant=variant,
        **common,
    )


def _names(variant: Variant) -> list[str]:
    """What a row of a study can be asked for by."""
    return [name for name in (variant.label, variant.row, variant.method) if name]


def _shallow(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)}


def portable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a reader without folders of this machine, such as that of label maps."""
    return {
        name: Path(value).name if isinstance(value, str) and _is_path(value) else value
        for name, value in options.items()
    }


def _is_path(text: str) -> bool:
    return "/" in text or "\\" in text or text.startswith("~")


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits of what ``value`` says, however its keys are ordered."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def unknown(what: str, name: str, known: Any) -> str:
    """What to say of a name that is none, with the nearest that is."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"no {what} is called {name!r}.{hint} There are: {', '.join(known)}."


def built(cls: type[Built], values: Any, where: str) -> Built:
    """A dataclass from what YAML or JSON holds; an error names the key, and the nearest right one.

    >>> built(Source, {"split": "val", "images": 5}, "example")
    Source(set=None, split='val', images=5)
    >>> built(Source, {"spilt": "val"}, "example")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: example: no key is called 'spilt'. Did you mean 'split'? There are: set, split, ...
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected keys and values, got {values!r:.60}.")
    hints = get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise ValueError(f"{where}: {unknown('key', key, hints)}")
    try:
        return cls(**{key: _as(hints[key], v, f"{where}: {key}") for key, v in values.items()})
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).partition('__init__() ')[2] or error}.") from error


def _as(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``, or a ValueError: YAML says lists where tuples are meant, and so on."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        choices = [choice for choice in arguments if choice is not type(None)]
        if len(choices) == 1:
            return _as(choices[0], value, where)
        if any(isinstance(value, choice) for choice in choices):
            return value
        raise ValueError(f"{where} is {value!r}; expected {_words(kind)}.")
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where}: {unknown('choice', value, arguments)}")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise ValueError(f"{where} is {value!r}; expected a list.")
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise ValueError(f"{where} is {value!r}; expected {len(arguments)} of them.")
        kinds_ = arguments if arguments[-1] is not Ellipsis else (arguments[0],) * len(value)
        return tuple(_as(k, v, where) for k, v in zip(kinds_, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is {value!r}; expected keys and values.")
        return {str(k): _as(arguments[1], v, f"{where}.{k}") for k, v in value.items()}
    if hasattr(kind, "__dataclass_fields__"):
        return value if isinstance(value, kind) else built(kind, value, where)
    right = {bool: bool, int: int, float: (int, float), str: str}[kind]
    if not isinstance(value, cast(Any, right)) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} is {value!r}; expected {_words(kind)}.")
    return value


def _words(kind: Any) -> str:
    known = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
    return known.get(kind) or " or ".join(known.get(k, str(k)) for k in get_args(kind))


def _found(name: str | Path, what: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ValueError(f"no file {path}.")
        return path
    for folder in SHIPPED:
        if (folder / what / f"{name}.yaml").is_file():
            return folder / what / f"{name}.yaml"
    raise ValueError(unknown(_SINGULAR[what], str(name), shipped(what)) + " Or name a YAML file.")


def _yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no keys and values.")
    return values
