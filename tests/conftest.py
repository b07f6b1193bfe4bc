from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings

from bestta import SourceProfile
from bestta.adapters.bestta import SINGLE, Bestta, BesttaConfig
from bestta.cli import main
from nets import Classifier, Segmenter, randomise, stream

# A loaded machine is slow, not wrong: no example has a deadline. A run in CI judges the change and
# not the draw: it takes the same examples every time; elsewhere each run looks at new ones.
settings.register_profile(
    "bestta",
    deadline=None,
    max_examples=60,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("bestta")


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def _python_hears_ctrl_c():
    """As in a terminal: a shell has what it runs in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Methods are tested as they are: a guard would have these nets' source model answer. Tests of what
# users get unless they say otherwise are marked "guarded".
BesttaConfig.__init__.__kwdefaults__["guard"] = False


@pytest.fixture(autouse=True)
def _guard(request, monkeypatch):
    if request.node.get_closest_marker("guarded") is not None:
        monkeypatch.setitem(BesttaConfig.__init__.__kwdefaults__, "guard", True)


# Likewise the parts of BESTTA: each image by its own statistics and learned from. Its usual form,
# which weighs the stream's statistics and learns while the style moves, is that of tests marked
# "usual".
@pytest.fixture(autouse=True)
def _usual(request, monkeypatch):
    if request.node.get_closest_marker("usual") is None:
        monkeypatch.setattr(Bestta, "presets", SINGLE)


@pytest.fixture
def segmenter() -> Segmenter:
    return randomise(Segmenter(), seed=1)


@pytest.fixture
def classifier() -> Classifier:
    return randomise(Classifier(), seed=2)


@pytest.fixture
def profile(segmenter) -> SourceProfile:
    return SourceProfile.collect(
        segmenter, stream(8, seed=3), layers=["layer1", "layer2", "layer3", "layer4"]
    )


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command as its entry point does, in this process: importing torch takes a second."""

    def run(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["bestta", *map(str, words)])
        with pytest.raises(SystemExit) as done:
            main()
        return Done(done.value.code or 0, *capsys.readouterr())

    return run
