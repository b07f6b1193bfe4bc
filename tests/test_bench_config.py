"""What is run: files that say it, mistakes in them, and the streams that come of it."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer.main
import yaml

from bench import SIZE, photographs, protocol, run_of, save
from bestta.adapters.registry import method_class
from bestta.benchmark import config
from bestta.benchmark.config import (
    Preparation,
    Protocol,
    Run,
    Source,
    Study,
    Variant,
    built,
    digest,
    read_method,
    read_protocol,
    read_study,
    runs,
    shipped,
)
from bestta.benchmark.parts import identity
from bestta.benchmark.streams import describe, source_images, stream_of
from bestta.cli.app import app
from bestta.data.corruptions import CORRUPTIONS
from bestta.data.weather import CONDITIONS
from bestta.models.cards import SHIPPED as MODELS
from bestta.reports.published import names as published_names
from bestta.training.recipes import recipes

FILES = [
    path for folder in config.SHIPPED for path in sorted(folder.glob("*/*.yaml")) if folder.is_dir()
]
READERS = {"protocols": read_protocol, "methods": read_method, "studies": read_study}
KINDS = {"protocols": 0, "methods": "--method", "studies": "--study"}


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


# Files that ship


def test_there_are_files_of_each_kind_to_look_at():
    counts = {kind: len(shipped(kind)) for kind in READERS}
    assert min(counts.values()) > 0
    assert {named(path) for path in FILES} == {
        f"{kind}/{name}" for kind in READERS for name in shipped(kind)
    }


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_shipped_file_reads_by_its_name_from_any_folder(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    read = READERS[path.parent.name]
    assert read(path.stem) == read(path)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_shipped_file_opens_with_a_command_that_runs_it(path):
    bench = typer.main.get_command(app).commands["bench"]
    lines = path.read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith("# bestta ")]
    assert commands[0] == lines[0]
    for command in commands:
        words = shlex.split(command.removeprefix("# "))
        assert words[:2] == ["bestta", "bench"]
        # The command's own parser: an option that is none, or a value that is none, is refused.
        parameters = bench.make_context("bench", words[2:]).params
        assert parameters["protocol"] in shipped("protocols")
        told = {
            "protocols": parameters["protocol"],
            "methods": (parameters["method"] or [None])[0],
            "studies": parameters["study"],
        }
        assert told[path.parent.name] == path.stem
        needs_files = read_protocol(parameters["protocol"]).set != "streets"
        assert needs_files == (parameters["data"] is not None)


@pytest.mark.parametrize("name", shipped("protocols"))
def test_a_shipped_protocol_has_methods_that_run_its_task_and_a_published_table_if_it_says_so(name):
    found = read_protocol(name)
    task = json.loads((MODELS / found.model / "card.json").read_text())["task"]
    assert found.about
    for run in runs(found):
        assert task in method_class(run.method.method).tasks
    assert found.published is None or found.published in published_names()


@pytest.mark.parametrize("name", shipped("studies"))
def test_a_shipped_study_runs_over_the_protocol_its_command_names(name):
    study = read_study(name)
    path = next(path for path in FILES if named(path) == f"studies/{name}")
    over = shlex.split(path.read_text(encoding="utf-8").splitlines()[0])[3]
    found = runs(read_protocol(over), study=study)
    assert len(found) == len(study.variants)
    assert {run.study for run in found} == {name}
    assert study.about
    assert study.published in (None, "protocol", *published_names())
    # Each variant is a run of its own, or it would be done once and counted twice.
    assert len({json.dumps(run.resolved(), sort_keys=True) for run in found}) == len(found)


def test_a_study_like_another_has_the_others_rows_and_its_own_behind_them(tmp_path):
    path = tmp_path / "more.yaml"
    path.write_text("like: methods-costly\nvariants: [{method: memo, label: MEMO}]\n")
    more, other = read_study(path), read_study("methods-costly")
    assert more.variants[:-1] == other.variants
    assert more.variants[-1].label == "MEMO"
    assert (more.name, more.changes) == ("more", {})
    assert other.changes  # which are the other's alone
    beside = tmp_path / "beside.yaml"
    beside.write_text("like: more.yaml\nvariants:\n")
    assert read_study(beside).variants == more.variants
    beside.write_text("like: more.yaml\nvariants: 3\n")
    with pytest.raises(ValueError, match="variants is 3; expected a list"):
        read_study(beside)
    path.write_text("like: more.yaml\n")
    with pytest.raises(ValueError, match="like itself"):
        read_study(path)


def test_rows_of_a_study_are_asked_for_by_label_letter_or_method():
    losses = read_study("losses")
    assert [v.row for v in losses.only(["(b)", "(k)"]).variants] == ["(b)", "(k)"]
    methods = read_study("methods")
    assert [v.label for v in methods.only(["bn_ema", "α-BN"]).variants] == ["α-BN", "BN-EMA"]
    with pytest.raises(ValueError, match="no row of the study 'methods' is called 'bn'"):
        methods.only(["bn"])


def test_the_study_of_losses_has_the_papers_twelve_rows():
    """Rows by the initials of their losses, from Table B of the paper's supplement."""
    rows = ["e", "s", "es", "ec", "el", "sc", "sl", "esc", "esl", "ecl", "scl", "escl"]
    initials = {"e": "entropy", "s": "style", "c": "content", "l": "l2"}
    found = runs(read_protocol("streets-continual"), study=read_study("losses"))
    assert [run.variant.row for run in found] == [f"({letter})" for letter in "abcdefghijkl"]
    defaults = method_class("bestta").Config()
    for run, row in zip(found, rows, strict=True):
        expected = {name: initial in row for initial, name in initials.items()}
        assert run.variant.marks == expected
        assert run.method.method == "bestta"
        weights = {
            name: run.method.settings.get(f"lambda_{name}", getattr(defaults, f"lambda_{name}"))
            for name in expected
        }
        assert {name: weight > 0 for name, weight in weights.items()} == expected
        assert run.method.settings.pop("guard") is False
        assert run.method.settings.keys() <= {f"lambda_{name}" for name in expected}


def test_the_study_of_positions_has_every_set_of_stages_once_small_ones_first():
    stages = ("layer1", "layer2", "layer3", "layer4")
    sets = [some for size in range(1, 5) for some in itertools.combinations(stages, size)]
    found = runs(read_protocol("streets-continual"), study=read_study("positions"))
    assert len(sets) == len(found) == 15
    for letter, run, some in zip("abcdefghijklmno", found, sets, strict=True):
        assert run.variant.row == f"({letter})"
        assert run.variant.marks == {stage: stage in some for stage in stages}
        layers = [f"backbone.{stage}" for stage in some]
        assert run.method.settings == {"layers": layers, "guard": False}


def test_a_study_changes_the_protocol_and_its_variants_the_batch():
    before = read_protocol("streets-continual")
    assert before.forgetting
    assert before.embeddings
    found = runs(before, study=read_study("batch-sizes"))
    assert {run.protocol.forgetting or run.protocol.embeddings for run in found} == {False}
    assert {run.protocol.published for run in found} == {"batch-sizes"}
    assert [run.protocol.batch for run in found] == [run.variant.marks["batch"] for run in found]
    assert {run.protocol.batch for run in found} == {1, 2, 4}
    assert all(run.protocol.rounds == before.rounds for run in found)
    correlation = runs(before, study=read_study("correlation"))
    assert [run.protocol.rounds for run in correlation] == [1]
    assert correlation[0].protocol.similarities


def test_a_variant_takes_the_label_it_is_given_or_the_methods_with_its_row():
    variants = (Variant(method="bestta", row="(a)"), Variant(method="tent", label="Mine"))
    found = runs(protocol(), study=Study(name="own", variants=variants))
    assert [run.method.label for run in found] == ["BESTTA (a)", "Mine"]


# Files of one's own


def test_a_file_of_ones_own_is_read_by_its_path_and_named_after_it(tmp_path):
    path = tmp_path / "evening.yaml"
    path.write_text("conditions: [night, clear]\nsize: [64, 32]\n")
    found = read_protocol(path, rounds=2, size=(32, 32))
    assert (found.name, found.conditions) == ("evening", ("night", "clear"))
    assert (found.rounds, found.size) == (2, (32, 32))


def test_settings_win_over_a_methods_file_and_leave_the_rest_of_it():
    assert read_method("bestta-still-single").settings == {"lr": 0.0, "statistics_decay": 0.0}
    changed = read_method("bestta-still-single", lr=0.5, rho=0.1)
    assert changed.settings == {"lr": 0.5, "statistics_decay": 0.0, "rho": 0.1}
    assert changed.label == read_method("bestta-still-single").label


def test_a_method_without_a_file_runs_with_its_defaults(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "SHIPPED", (tmp_path,))
    assert shipped("methods") == []
    assert read_method("tent") == config.Method(method="tent", label="tent")


def test_runs_are_the_methods_in_order_for_each_seed_in_turn():
    methods = [read_method("tent"), read_method("source")]
    found = runs(protocol(), methods, seeds=2, threads=3)
    assert [(run.seed, run.method.method) for run in found] == [
        (0, "tent"),
        (0, "source"),
        (1, "tent"),
        (1, "source"),
    ]
    assert {run.threads for run in found} == {3}
    default = runs(protocol(methods=("bn_stats",)))
    assert [run.method.label for run in default] == ["BN Stats Adapt"]


# Mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("condition: [fog]", "no key is called 'condition'. Did you mean 'conditions'?"),
        ("source: {spilt: val}", "source: no key is called 'spilt'. Did you mean 'split'?"),
        ("source: val", "source: expected keys and values, got 'val'"),
        ("source: {images: many}", "source: images is 'many'; expected a whole number."),
        ("source: {images: 0}", "source: images must be 1 or more, not 0."),
        ("source: {set: street}", "kind of set is called 'street'. Did you mean 'streets'?"),
        ("rounds: three", "rounds is 'three'; expected a whole number."),
        ("rounds: true", "rounds is True; expected a whole number."),
        ("rounds: 1.5", "rounds is 1.5; expected a whole number."),
        ("rounds: null", "rounds is None; expected a whole number."),
        ("rounds: 0", "rounds must be 1 or more, not 0."),
        ("every: 0", "every must be 1 or more, not 0."),
        ("batch: -1", "batch must be 1 or more, not -1."),
        ("images: 0", "images must be 1 or more, not 0."),
        ("severity: 6", "severities go from 1 to 5."),
        ("severities: [1, 0]", "severities go from 1 to 5."),
        ("shuffle: 1", "shuffle is 1; expected true or false."),
        ("conditions: fog", "conditions is 'fog'; expected a list."),
        ("conditions: [1]", "conditions is 1; expected a word."),
        ("conditions: []", "there must be a condition at least."),
        ("conditions: [fogg]", "no condition is called 'fogg'. Did you mean 'fog'?"),
        ("effect: corruptions\nconditions: [rain]", "no condition is called 'rain'."),
        ("effect: wether", "no choice is called 'wether'. Did you mean 'weather'?"),
        ("recipe: gradual", "a gradual stream is made of corruptions, not of weather."),
        ("precision: fp16", "no choice is called 'fp16'."),
        ("size: 64", "size is 64; expected a list."),
        ("size: [64]", "size is [64]; expected 2 of them."),
        ("size: [64, 0]", "size is width and height, such as [512, 256], not [64, 0]."),
        ("options: [1]", "options is [1]; expected keys and values."),
        ("set: citiscapes", "kind of set is called 'citiscapes'. Did you mean 'cityscapes'?"),
        ("model: street", "no model is called 'street'. Did you mean 'streets'?"),
        ("forgetting: true", "say which, in 'source'."),
        ("embeddings: true", "say which, in 'source'."),
        ("- fog", "holds no keys and values."),
        ("", "holds no keys and values."),
        ("size: [64", "is no YAML"),
    ],
)
def test_a_mistake_in_a_protocols_file_is_told_with_what_works(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_protocol(path)
    assert "mine" in str(error.value)  # the file, or the protocol that it makes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label: Mine", "missing 1 required keyword-only argument: 'method'"),
        ("method: besta", "no method is called 'besta'. Did you mean 'bestta'?"),
        ("method: tent\nsetings: {}", "no key is called 'setings'. Did you mean 'settings'?"),
        ("method: tent\nsettings:", "settings is None; expected keys and values."),
        ("method: tent\nsettings: {lrr: 1}", "no setting of 'tent' is called 'lrr'. Did you mean"),
        ("method: eata\nprepare: {imagse: 5}", "prepare: no key is called 'imagse'."),
        ("method: eata\nprepare: {images: 0}", "prepare: images must be 1 or more, not 0."),
        ("method: eata\nprepare: {settings: {lrr: 1}}", "no setting of 'eata' is called 'lrr'."),
        ("method: eata\nprepare: {batch: 0}", "prepare: batch must be 1 or more, not 0."),
    ],
)
def test_a_mistake_in_a_methods_file_is_told_with_what_works(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_method(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("about: nothing", "missing 1 required keyword-only argument: 'variants'"),
        ("variants: []", "there must be a variant at least."),
        ("variants: [tent]", "variants: expected keys and values, got 'tent'"),
        ("variants: [{method: tent, mark: {}}]", "variants: no key is called 'mark'. Did you mean"),
        ("variants: [{method: tent, marks: {a: [1]}}]", "variants: marks.a is [1]; expected true"),
        ("variants: [{method: tant}]", "no method is called 'tant'. Did you mean 'tent'?"),
        ("variants: [{method: tent, batch: 0}]", "batch must be 1 or more, not 0."),
        ("variants: [{method: tent, settings: {x: 1}}]", "no setting of 'tent' is called 'x'."),
        ("changes: {round: 1}\nvariants: [{method: tent}]", "no key is called 'round'. Did you"),
        ("changes: {rounds: 0}\nvariants: [{method: tent}]", "rounds must be 1 or more, not 0."),
    ],
)
def test_a_mistake_in_a_studys_file_is_told_with_what_works(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        runs(protocol(), study=read_study(path))


@pytest.mark.parametrize(
    ("read", "name", "message"),
    [
        (read_protocol, "street-quick", "no protocol is called 'street-quick'. Did you mean 's"),
        (read_method, "tnet", "no method is called 'tnet'. Did you mean 'tent'?"),
        (read_study, "loses", "no study is called 'loses'. Did you mean 'losses'?"),
        (read_protocol, "nowhere.yaml", "no file nowhere.yaml."),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(read, name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(name)


def test_a_setting_that_is_none_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"'bestta' is called 'roh'\. Did you mean 'rho'"):
        read_method("bestta", roh=0.1)


def test_a_study_does_not_go_with_methods_and_there_is_a_seed_at_least():
    study = Study(name="own", variants=(Variant(method="tent"),))
    with pytest.raises(ValueError, match="name a study or methods, not both"):
        runs(protocol(), [read_method("tent")], study=study)
    with pytest.raises(ValueError, match="seeds must be 1 or more, not 0"):
        runs(protocol(), seeds=0)


def test_a_set_of_other_classes_than_the_models_is_refused(tmp_path):
    made = photographs(tmp_path, 1)
    made["options"]["classes"] = ["road", "grass"]
    with pytest.raises(
        ValueError, match="folder has the 2 classes road, grass; the model 'streets'"
    ):
        stream_of(run_of(**made))


def test_a_reader_is_not_handed_options_it_does_not_take(tmp_path):
    made = photographs(tmp_path, 1)
    made["options"] = {"lables": "x"}
    with pytest.raises((TypeError, ValueError), match="lables"):
        stream_of(run_of(**made))


# From one process to another, and into the record


def test_a_run_comes_out_of_json_as_it_went_in(tmp_path):
    (tmp_path / "mine.py").write_text("")
    variant = Variant(
        method="alpha_bn", row="(a)", marks={"on": True, "rho": 0.1, "batch": 2, "what": "word"}
    )
    full = Run(
        protocol=protocol(
            source=Source(set="streets", split="val", images=3), forgetting=True, severities=(1, 2)
        ),
        method=config.Method(
            method="alpha_bn",
            label="α",
            settings={"prior": float("inf")},
            prepare=Preparation(images=None, settings={"weight": [0.5]}),
        ),
        study="own",
        variant=variant,
        seed=3,
        data="data",
        source_data="more",
        plugins=(str(tmp_path / "mine.py"),),
        checkpoint_seconds=0.5,
    )
    assert Run.from_json(full.to_json()) == full
    assert Run.from_json(run_of().to_json()) == run_of()


def test_what_a_record_says_of_a_run_holds_no_folder_of_the_machine(tmp_path):
    made = photographs(tmp_path, 1)
    (tmp_path / "mine").symlink_to(MODELS / "streets")
    run = run_of(**made, model=str(tmp_path / "mine"))
    run = replace(run, source_data=str(tmp_path), plugins=(str(tmp_path / "plugin.py"),), workers=2)
    resolved = run.resolved()
    assert str(tmp_path) in run.to_json()
    assert str(tmp_path) not in json.dumps(resolved)
    assert str(tmp_path) not in json.dumps(describe(run, stream_of(run)))
    assert resolved["protocol"]["model"] == "mine"
    assert resolved["protocol"]["options"] == {"labels": "labels"}
    assert resolved["plugins"] == ["plugin.py"]
    assert not {"data", "source_data", "workers"} & resolved.keys()


def test_what_a_record_says_of_a_run_is_all_that_decides_it():
    resolved = run_of("bestta", rounds=2, run={"seed": 4}).resolved()
    assert (resolved["seed"], resolved["protocol"]["rounds"]) == (4, 2)
    assert resolved["method"] == {"method": "bestta", "label": "BESTTA", "settings": {}}
    assert run_of("eata").resolved()["method"]["prepare"]["images"] == 500
    again = built(Protocol, resolved["protocol"], "record")
    assert again == protocol(rounds=2)


def test_a_digest_does_not_depend_on_the_order_of_keys():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    assert re.fullmatch("[0-9a-f]{16}", digest({}))


# Streams


def key(run: Run) -> str:
    return describe(run, stream_of(run))["key"]


@pytest.mark.parametrize(
    "change",
    [
        {"every": 2},
        {"batch": 2},
        {"size": (32, 32)},
        {"images": 3},
        {"severity": 4},
        {"model": "cityscapes"},
        {"precision": "bf16"},
        {"rounds": 2},
        {"conditions": ("night", "fog")},
        {"recipe": "mixed"},
        {"redraw": True},
        {"shuffle": True},
        {"split": "train"},
        {"options": {"seed": 1}},
        {"name": "other"},
        {"effect": "corruptions", "conditions": ("fog", "snow")},
    ],
    ids=str,
)
def test_streams_that_differ_are_not_compared(change):
    assert key(run_of(**change)) != key(run_of())


def test_streams_of_other_methods_seeds_and_machines_are_compared():
    same = [
        run_of("bestta"),
        run_of("tent", run={"seed": 3}),
        run_of(run={"workers": 2, "threads": 2}),
        run_of(about="another word"),
        run_of(source=Source(images=2), forgetting=True),
    ]
    assert {key(run) for run in same} == {key(run_of())}


def test_the_name_of_a_record_tells_runs_apart_that_give_other_numbers():
    def name(run):
        return identity(run, stream_of(run))

    apart = [
        run_of("bestta"),
        run_of("tent"),
        run_of("bestta", run={"seed": 1}),
        run_of("bestta-still"),
        run_of(read_method("bestta", rho=0.1)),
        run_of("bestta", batch=2),
        run_of("bestta", run={"threads": 2}),
        run_of("bestta", source=Source(images=2), forgetting=True),
    ]
    names = [name(run) for run in apart]
    assert len(set(names)) == len(apart)
    assert re.fullmatch("tiny-bestta-s0-[0-9a-f]{8}", names[0])
    assert re.fullmatch("tiny-bestta-s1-[0-9a-f]{8}", names[2])
    assert name(run_of("bestta", run={"workers": 2, "checkpoint_seconds": 1.0})) == names[0]
    study = Study(name="own", variants=(Variant(method="tent", row="(b)"),))
    assert re.fullmatch("tiny-tent-b-s0-[0-9a-f]{8}", name(runs(protocol(), study=study)[0]))


def test_every_third_frame_is_every_third_of_each_block():
    whole = stream_of(run_of(images=5, rounds=2))
    some = stream_of(run_of(images=5, rounds=2, every=3))
    expected = [
        whole.name_at(position)
        for block in whole.blocks
        for position in range(block.start, block.stop)
        if (position - block.start) % 3 == 0
    ]
    assert [some.name_at(position) for position in range(len(some))] == expected
    assert [len(block) for block in some.blocks] == [2, 2, 2, 2]


def test_clear_leaves_images_as_they_are():
    stream = stream_of(run_of(conditions=("clear", "fog")))
    scene = stream.domains[0].images[1]
    assert np.array_equal(stream[1].image, scene.image)
    assert not np.array_equal(stream[3].image, scene.image)
    assert stream[3].name == scene.name


def test_source_images_are_clear_spread_and_of_the_size_the_model_learned_from():
    source = Source(split="val", images=3)
    images = source_images(run_of(source=source, forgetting=True))
    assert len(images) == 3
    assert images[0].image.shape == (128, 256, 3)  # the card of streets says 256x128
    assert source_images(run_of(source=source)) is None  # nobody looks at them
    assert source_images(run_of()) is None


def test_source_images_of_another_set_want_a_folder_of_their_own():
    asked = {"source": Source(set="cityscapes"), "forgetting": True}
    with pytest.raises(ValueError, match=r"source images of cityscapes: .*--source-data.*--no-so"):
        source_images(run_of(**asked, run={"data": "of the stream"}))
    with pytest.raises(ValueError, match="of the source"):
        source_images(run_of(**asked, run={"source_data": "of the source"}))


# The paper's protocols, on trees of their shape


def street_files(root: Path, sets: dict[str, str]) -> None:
    """Two random pictures of 64x32 pixels and label maps for each image and label pattern."""
    draw = np.random.default_rng(0)
    for image, label in sets.items():
        for number in range(2):
            save(root / image.format(number), draw.integers(0, 256, (32, 64, 3), np.uint8))
            save(root / label.format(number), draw.integers(0, 19, (32, 64), np.uint8))


@pytest.fixture
def acdc(tmp_path) -> Path:
    street_files(
        tmp_path / "acdc",
        {
            f"rgb_anon/{name}/train/GOPR01/GOPR01_frame_{{:06}}_rgb_anon.png": (
                f"gt/{name}/train/GOPR01/GOPR01_frame_{{:06}}_gt_labelTrainIds.png"
            )
            for name in CONDITIONS
        },
    )
    return tmp_path / "acdc"


@pytest.fixture
def cityscapes(tmp_path) -> Path:
    stem = "val/lindau/lindau_{:06}_000019"
    image, label = f"leftImg8bit/{stem}_leftImg8bit.png", f"gtFine/{stem}_gtFine_labelTrainIds.png"
    street_files(tmp_path / "cityscapes", {image: label})
    return tmp_path / "cityscapes"


def test_the_acdc_protocol_is_four_conditions_ten_times_over(acdc):
    run = Run(
        protocol=read_protocol("acdc-continual", size=SIZE),
        method=read_method("source"),
        data=str(acdc),
    )
    stream = stream_of(run)
    assert [block.name for block in stream.blocks] == ["fog", "night", "rain", "snow"] * 10
    assert [block.round for block in stream.blocks] == [r for r in range(10) for _ in range(4)]
    assert len(stream) == 80
    for position, condition in ((0, "fog"), (2, "night"), (4, "rain"), (6, "snow")):
        assert stream[position].name.startswith(f"{condition}/train/")
    about = describe(run, stream)
    assert (about["severity"], about["family"], about["set"]) == (None, None, "acdc")


def test_the_gradual_protocol_is_36_blocks_that_swell_and_fade(cityscapes):
    run = Run(
        protocol=read_protocol("cityscapes-gradual", size=SIZE),
        method=read_method("source"),
        data=str(cityscapes),
    )
    stream = stream_of(run)
    assert [block.name for block in stream.blocks] == [
        f"{name}-{severity}"
        for name in ("brightness", "fog", "frost", "snow")
        for severity in (1, 2, 3, 4, 5, 4, 3, 2, 1)
    ]
    assert len(stream.blocks) == 36
    assert stream.rounds == 1
    about = describe(run, stream)
    assert about["severities"] == [1, 2, 3, 4, 5, 4, 3, 2, 1]
    assert about["severity"] is None


def test_a_set_that_is_read_from_files_wants_their_folder():
    with pytest.raises(ValueError, match="acdc is read from files: name their folder with --data"):
        stream_of(Run(protocol=read_protocol("acdc-continual"), method=read_method("source")))


def test_studies_without_source_images_do_without_their_folder(acdc):
    """As the command in losses.yaml has it: --data alone."""
    found = runs(read_protocol("acdc-continual"), study=read_study("losses"), data=str(acdc))
    assert source_images(found[0]) is None
    with pytest.raises(ValueError, match="--source-data"):
        source_images(replace(found[0], protocol=read_protocol("acdc-continual")))


def test_the_files_of_the_library_are_plain_yaml():
    for path in FILES:
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path
    assert set(CORRUPTIONS) == set(read_protocol("cifar10c").conditions)
    assert read_protocol("cifar10c").conditions == read_protocol("cifar10c-rendered").conditions


def test_a_set_without_conditions_of_its_own_shows_one():
    plain = {"name": "plain", "set": "streets", "effect": "photographs"}
    assert Protocol(**plain, conditions=("clear",)).conditions == ("clear",)
    with pytest.raises(ValueError, match="acdc, cifar10c have several"):
        Protocol(**plain, conditions=("clear", "fog"))


def test_a_study_of_segmentation_is_refused_for_a_classifier():
    protocol = read_protocol("cifar10c-rendered")
    with pytest.raises(ValueError, match="'losses' is one of segmentation; cifar10 does class"):
        config.runs(protocol, study=config.read_study("losses"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": "mixed", "shuffle": True}, "shuffle is for continual"),
        ({"family": "cifar"}, "family is for corruptions"),
        (
            {"recipe": "gradual", "effect": "corruptions", "conditions": ("fog",), "redraw": True},
            "nothing to redraw",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        protocol(**changes)


def test_held_out_images_are_those_that_the_recipe_never_trains_on():
    """By their names: what `recipes` itself splits off, spread as any other number of images."""
    splits = recipes()["streets"].splits(None)
    expected = {splits.held_out.name(i) for i in range(0, 100, 25)}
    stream = stream_of(run_of(split="held-out", images=4, size=None))
    images = stream.domains[0].images
    names = {images.name(i) for i in range(len(images))}
    assert names == expected
    other = splits.train, splits.test
    assert not names & {s.name(i) for s in other for i in range(len(s))}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"set": "cityscapes"}, "of its own set"),
        ({"set": "cityscapes", "model": "cityscapes"}, "--data"),
        ({"size": (64, 32)}, "without another size"),
        ({"options": {"seed": 3}}, "without options"),
    ],
)
def test_held_out_images_that_there_are_not_are_told_of(made, words):
    with pytest.raises(ValueError, match=words):
        stream_of(run_of(**{"split": "held-out", "size": None, "options": {}, **made}))
