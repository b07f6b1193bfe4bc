"""EcoTTA against a plain transcription of its network, its loss and its two kinds of training."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestta
from bestta import SourceProfile, models
from bestta.adapters.ecotta import Ecotta, MetaBlock, choose_parts
from nets import Classifier, Segmenter, TokenClassifier, randomise, same, snapshot, stage, stream

PARTS = ("first", "second")


class TwoParts(nn.Module):
    """A stem, two parts of which the first halves the map, and a head; logits (B, K) or a map."""

    def __init__(self, *, dense: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.first = stage(4, 5, stride=2)
        self.second = stage(5, 6)
        self.head = nn.Conv2d(6, 7, 1)
        self.dense = dense

    def forward(self, image: Tensor) -> Tensor:
        logits = self.head(self.second(self.first(self.stem(image))))
        return logits if self.dense else logits.mean((2, 3))


class Plain(nn.Module):
    """A meta block as `torch.nn` has its pieces; the other implementation these tests go by."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.branch_norm = nn.BatchNorm2d(outputs)
        self.output_norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.output_norm(y) + F.relu(self.branch_norm(self.conv(x)))

    def load(self, tensors: dict[str, Tensor], part: str) -> Plain:
        own = {
            k.removeprefix(f"{part}/"): v for k, v in tensors.items() if k.startswith(f"{part}/")
        }
        own["conv.weight"] = own.pop("conv")
        own.pop("stride", None)
        missing, unknown = self.load_state_dict(own, strict=False)
        assert not unknown
        assert all(name.endswith("num_batches_tracked") for name in missing)
        return self

    def tensors(self, part: str) -> dict[str, Tensor]:
        kept = {k: v for k, v in self.state_dict().items() if not k.endswith("tracked")}
        kept["conv"] = kept.pop("conv.weight")
        return {f"{part}/{k}": v for k, v in kept.items()}


def plain_blocks(tensors: dict[str, Tensor]) -> nn.ModuleList:
    return nn.ModuleList(
        [
            Plain(4, 5, stride=2).load(tensors, "first"),
            Plain(5, 6, stride=1).load(tensors, "second"),
        ]
    ).train()


def run_plain(
    net: TwoParts, blocks: nn.ModuleList, image: Tensor, cut: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Logits and distances, part by part; ``cut`` separates the parts as the notebook does."""
    x, distances = net.stem(image), []
    for part, block in zip((net.first, net.second), blocks, strict=True):
        x = x.detach() if cut else x
        y = part(x)
        x = block(x, y)
        distances.append(F.l1_loss(x, y.detach()))
    logits = net.head(x)
    return logits if net.dense else logits.mean((2, 3)), distances


def net_of(dense: bool = False) -> TwoParts:
    return randomise(TwoParts(dense=dense), seed=11)


def source(count: int = 3, batch: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Labelled source batches, of 7 classes."""
    generator = torch.Generator().manual_seed(5)
    labels = [torch.randint(7, (batch,), generator=generator) for _ in range(count)]
    return list(zip(stream(count, seed=3, batch=batch, size=8), labels, strict=True))


def warmed_up(net: nn.Module, **settings) -> SourceProfile:
    images = stream(3, seed=3, batch=4, size=8)
    return bestta.prepare(net, images, method="ecotta", **{"warmup_epochs": 1, **settings})


def adapter_of(net: nn.Module, profile: SourceProfile, **settings) -> Ecotta:
    adapter = bestta.adapt(net, profile, method="ecotta", **settings)
    assert isinstance(adapter, Ecotta)
    return adapter


# --- the block ------------------------------------------------------------------------------


def test_a_block_adds_the_normed_output_and_the_rectified_branch():
    # By hand. conv: (0, 2) · 3 = (0, 6), normed to (-1, 1), · 0.5 + 0.25 = (-0.25, 0.75),
    # rectified (0, 0.75). Output: (1, 3) normed to (-1, 1), · 2 + 5 = (3, 7). Sum (3, 7.75).
    block = MetaBlock(torch.full((1, 1, 1, 1), 3.0), (1, 1))
    with torch.no_grad():
        block.branch_norm.weight.fill_(0.5)
        block.branch_norm.bias.fill_(0.25)
        block.output_norm.weight.fill_(2.0)
        block.output_norm.bias.fill_(5.0)
    x, y = torch.tensor([[[[0.0, 2.0]]]]), torch.tensor([[[[1.0, 3.0]]]])
    expected = torch.tensor([[[[3.0, 7.75]]]])
    torch.testing.assert_close(block(x, y), expected, rtol=0, atol=1e-4)


def test_a_new_block_gives_nearly_the_output_of_its_part_and_all_of_it_can_learn():
    x, y = torch.randn(4, 3, 8, 8) * 2, torch.randn(4, 5, 8, 8) * 3 + 7
    block = MetaBlock.begun(x, y, 3, torch.Generator().manual_seed(0))
    with torch.no_grad():
        # ReLU of a tenth of a normal variable, in deviations of y: √(1/2) / 10 in root mean square.
        difference = (block(x, y) - y).square().mean().sqrt() / y.std()
    assert 0.05 < difference < 0.09
    (block(x, y) * torch.randn(y.shape)).sum().backward()
    assert all(bool((p.grad != 0).all()) for p in block.parameters())


@pytest.mark.parametrize(
    ("size", "stride"), [((4, 4), (2, 2)), ((8, 2), (1, 4)), ((3, 3), (3, 3)), ((16, 16), (1, 1))]
)
def test_the_branch_gets_the_size_of_the_parts_output(size, stride):
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 5, *size)
    block = MetaBlock.begun(x, y, 3, torch.Generator().manual_seed(0))
    assert block.stride == stride
    assert block(x, y).shape == y.shape
    odd = torch.randn(2, 5, size[0] + 1, size[1] + 1)  # another image size on the stream
    assert block(x, odd).shape == odd.shape


# --- the warm-up ----------------------------------------------------------------------------


def plain_start(net: TwoParts, **settings) -> dict[str, Tensor]:
    """The blocks as they start: the first batch alone, with steps of size zero."""
    start = bestta.prepare(
        net, source()[:1], method="ecotta", warmup_epochs=1, warmup_lr=0.0, **settings
    )
    tensors = start.prepared["ecotta"]
    # That batch has moved the running statistics, towards (nearly) themselves; undo it.
    with torch.no_grad():
        x = net.stem(source()[0][0])
        for part, (inputs, outputs, stride) in zip(
            (net.first, net.second), ((4, 5, 2), (5, 6, 1)), strict=True
        ):
            name = PARTS[outputs - 5]
            branch = F.conv2d(x, tensors[f"{name}/conv"], None, stride, padding=1)
            assert x.shape[1] == inputs
            x = part(x)
            for norm, seen in (("branch_norm", branch), ("output_norm", x)):
                variance, mean = torch.var_mean(seen, (0, 2, 3), correction=0)
                tensors[f"{name}/{norm}.running_mean"] = mean
                tensors[f"{name}/{norm}.running_var"] = variance
    return dict(tensors)


def test_the_warm_up_is_sgd_of_published_size_on_the_cross_entropy_of_the_blocks_alone():
    net, images = net_of(), source()
    before = snapshot(net)
    # A transcription: torch.nn's batch norms in training mode, torch.optim's SGD, 5e-2 and 0.9.
    blocks = plain_blocks(plain_start(net))
    sgd = torch.optim.SGD(blocks.parameters(), lr=5e-2, momentum=0.9)
    for _ in range(2):
        for image, label in images:
            loss = F.cross_entropy(run_plain(net, blocks, image)[0], label)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    net.zero_grad()
    profile = bestta.prepare(net, images, method="ecotta", warmup_epochs=2)
    found = profile.prepared["ecotta"]
    for part, block in zip(PARTS, blocks, strict=True):
        for name, expected in block.tensors(part).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)
    assert same(before, snapshot(net))
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


def test_the_warm_up_goes_through_the_images_ten_times_unless_told_otherwise():
    class Counted(list):
        rounds = 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            self.rounds += 1
            return super().__iter__()

    images, few = Counted(source(1)), Counted(source(1))
    bestta.prepare(net_of(), images, method="ecotta")
    bestta.prepare(net_of(), few, method="ecotta", warmup_epochs=2)
    # Looking whether they can be gone through again may count once, in both alike.
    assert images.rounds - few.rounds == 8


def test_without_labels_the_source_network_is_the_teacher():
    net = net_of()
    with torch.no_grad():
        labelled = [(image, net(image).argmax(1)) for image, _ in source()]
    told = bestta.prepare(net, labelled, method="ecotta", warmup_epochs=2)
    alone = bestta.prepare(net, [x for x, _ in labelled], method="ecotta", warmup_epochs=2)
    assert same(told.prepared["ecotta"], alone.prepared["ecotta"])


def test_the_warm_up_learns():
    net = randomise(Segmenter(), seed=11)
    images = stream(2, seed=3, batch=4)
    batches = [(x, (x[:, 0] > 0).long()) for x in images]  # a class is the sign of the first plane
    profile = bestta.prepare(net, batches, method="ecotta", warmup_epochs=15)
    adapter = adapter_of(net, profile, lr=0.0)
    for image, label in batches:
        with torch.no_grad():
            before = F.cross_entropy(net(image), label)
        assert F.cross_entropy(adapter(image), label) < 0.7 * before


def test_blocks_are_drawn_from_the_seed_and_from_nothing_else():
    net = net_of()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = warmed_up(net).prepared["ecotta"]
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(first, warmed_up(net).prepared["ecotta"])
    assert not torch.equal(
        first["first/conv"], warmed_up(net, seed=1).prepared["ecotta"]["first/conv"]
    )


class Interrupted(list):
    """Source batches; Ctrl-C is pressed as the given one is fetched."""

    at = 5
    fetched = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for item in super().__iter__():
            self.fetched += 1
            if self.fetched == self.at:
                signal.raise_signal(signal.SIGINT)
            yield item


def test_a_stopped_warm_up_goes_on_as_if_it_had_not_been(tmp_path):
    net = net_of()
    whole = bestta.prepare(net, source(), method="ecotta", warmup_epochs=3)
    kept = tmp_path / "kept"
    with pytest.raises(KeyboardInterrupt, match="stopped after batch 5"):
        bestta.prepare(
            net, Interrupted(source()), method="ecotta", warmup_epochs=3, checkpoint=kept
        )
    rest = bestta.prepare(net, source(), method="ecotta", warmup_epochs=3, checkpoint=kept)
    assert same(whole.prepared["ecotta"], rest.prepared["ecotta"])


# --- the stream -----------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True])
def test_updates_are_those_of_the_published_loss_and_optimiser(dense):
    net = net_of(dense)
    images = stream(4, seed=7, batch=6, size=8, shift=0.5)
    profile = warmed_up(net)
    adapter = adapter_of(net, profile)
    # A transcription with the published constants: E0 = 0.4 ln 7, λ = 0.5, SGD 5e-3 and 0.9. The
    # entropy goes through the whole graph, the distances through one cut between the parts.
    blocks = plain_blocks(profile.prepared["ecotta"])
    sgd = torch.optim.SGD(blocks.parameters(), lr=5e-3, momentum=0.9)
    shares = []
    for image in images:
        prediction = adapter(image)
        logits, _ = run_plain(net, blocks, image)
        torch.testing.assert_close(prediction, logits.detach(), rtol=1e-4, atol=1e-5)
        entropies = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
        reliable = entropies[entropies < 0.4 * math.log(7)]
        shares.append(len(reliable) / entropies.numel())
        sgd.zero_grad()
        reliable.mean().backward()
        distances = torch.stack(run_plain(net, blocks, image, cut=True)[1])
        (0.5 * distances.sum()).backward()
        sgd.step()
        expected = {"entropy": reliable.mean().item(), "distillation": distances.sum().item()}
        expected["total"] = expected["entropy"] + 0.5 * expected["distillation"]
        assert adapter.last.losses == pytest.approx(expected, rel=1e-4)
    assert all(0 < share < 1 for share in shares)  # the filter has had something to do
    for part, block in zip(PARTS, blocks, strict=True):
        for name, value in block.tensors(part).items():
            if name in adapter.trainable:
                torch.testing.assert_close(
                    adapter.trainable[name].detach(), value, rtol=1e-4, atol=1e-6
                )


def test_predictions_count_as_reliable_below_two_fifths_of_the_highest_entropy():
    # 0.4 ln 10 = 0.92103, and 0.4 ln 2 = 0.27726.
    adapter = adapter_of(net := net_of(), warmed_up(net))
    values = torch.tensor([[0.0, 0.9210], [0.9211, 2.3]])
    assert adapter.keep_reliable(values, classes=10).tolist() == values[0].tolist()
    assert adapter.keep_reliable(torch.tensor([0.2772, 0.2773]), classes=2).shape == (1,)


def test_a_distance_moves_the_block_it_belongs_to_and_no_other():
    net = net_of()
    adapter = adapter_of(net, warmed_up(net))
    _, distances = adapter.network(stream(1, seed=7, batch=4, size=8)[0])
    first = adapter.network.weights_of("first")
    through = torch.autograd.grad(distances["second"], list(first.values()), retain_graph=True)
    assert any(bool((g != 0).any()) for g in through)  # it would, if it were let
    found = adapter.gradients(None, {"second": distances["second"]})
    assert not any(bool((found[name] != 0).any()) for name in first)
    assert all(bool((found[name] != 0).any()) for name in adapter.network.weights_of("second"))


def test_without_a_reliable_prediction_the_distance_is_still_descended():
    net = net_of()
    # d mean|x̃ − x| / d bias of a channel is the mean sign there, divided by the channels.
    profile = warmed_up(net)
    adapter = adapter_of(net, profile, margin=0.0, lr=0.1, momentum=0.0, lambda_distillation=2.0)
    image = stream(1, seed=7, batch=4, size=8)[0]
    with torch.no_grad():
        y = net.first(net.stem(image))
        x = plain_blocks(profile.prepared["ecotta"])[0](net.stem(image), y)
    expected = profile.prepared["ecotta"]["first/output_norm.bias"] - 0.1 * 2 * (
        (x - y).sign().mean((0, 2, 3)) / 5
    )
    adapter(image)
    assert adapter.last.adapted
    assert set(adapter.last.losses) == {"distillation", "total"}
    torch.testing.assert_close(adapter.trainable["first/output_norm.bias"].detach(), expected)


def test_without_a_reliable_prediction_and_without_distance_nothing_moves():
    net = net_of()
    adapter = adapter_of(net, warmed_up(net), margin=0.0, lambda_distillation=0.0)
    before = adapter.state()
    adapter(stream(1, seed=7, size=8)[0])
    assert not adapter.last.adapted
    assert "reliable" in adapter.last.reason
    assert same(before, adapter.state())


def test_without_a_learning_rate_the_blocks_stay_as_the_warm_up_left_them():
    net = net_of()
    adapter = adapter_of(net, warmed_up(net), lr=0.0)
    before = adapter.state()
    adapter(stream(1, seed=7, size=8)[0])
    assert not adapter.last.adapted
    assert "lr=0" in adapter.last.reason
    assert same(before, adapter.state())


def test_the_prior_leads_from_the_batchs_statistics_to_those_of_the_warm_up():
    net = net_of()
    profile = warmed_up(net)
    image = stream(1, seed=7, batch=4, size=8, shift=1.0)[0]
    blocks = plain_blocks(profile.prepared["ecotta"])
    with torch.no_grad():
        by_batch = run_plain(net, blocks, image)[0]
        by_warm_up = run_plain(net, plain_blocks(profile.prepared["ecotta"]).eval(), image)[0]
    assert not torch.allclose(by_batch, by_warm_up, atol=1e-2)
    for prior, expected in ((0.0, by_batch), (math.inf, by_warm_up)):
        found = adapter_of(net, profile, prior=prior, lr=0.0)(image)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # Four images against four: means and variances halfway, at the first norm by hand.
    adapter = adapter_of(net, profile, prior=4.0, lr=0.0)
    tensors = profile.prepared["ecotta"]
    with torch.no_grad():
        y = net.first(net.stem(image))
        variance, mean = torch.var_mean(y, (0, 2, 3), correction=0)
        mean = (mean + tensors["first/output_norm.running_mean"]) / 2
        variance = (variance + tensors["first/output_norm.running_var"]) / 2
        weight, bias = (tensors[f"first/output_norm.{k}"] for k in ("weight", "bias"))
        expected = F.batch_norm(y, mean, variance, weight, bias)
        torch.testing.assert_close(adapter.network.blocks["first"].output_norm(y), expected)


def test_a_saved_profile_makes_the_same_adapter(tmp_path):
    net = randomise(Segmenter(), seed=11)
    profile = bestta.prepare(
        net,
        stream(2, seed=3),
        method="ecotta",
        warmup_epochs=1,
        parts=["layer2", "layer4"],
        kernel=1,
    )
    profile.save(tmp_path / "profile")
    first = adapter_of(net, profile)
    second = adapter_of(net, SourceProfile.load(tmp_path / "profile"))
    assert second.config.parts == ("layer2", "layer4")
    assert second.trainable["layer2/conv"].shape == (8, 6, 1, 1)
    for image in stream(3, seed=7):
        assert torch.equal(first(image), second(image))
    assert same(first.state(), second.state())


def test_adapting_leaves_the_profile_as_it_was():
    net = net_of()
    profile = warmed_up(net)
    before = {name: tensor.clone() for name, tensor in profile.prepared["ecotta"].items()}
    adapter = adapter_of(net, profile)
    for image in stream(3, seed=7, size=8):
        adapter(image)
    assert same(before, dict(profile.prepared["ecotta"]))


# --- parts ----------------------------------------------------------------------------------


class Deep(nn.Module):
    """One encoder in three stages, of which the second has six blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [stage(4, 4) for _ in range(6)]
        self.encoder = nn.Sequential(stage(3, 4), nn.Sequential(*blocks))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.encoder(image))


class Twice(Segmenter):
    def forward(self, image: Tensor) -> Tensor:
        low = self.layer2(self.layer1(image))
        return self.head(torch.cat([low, self.layer4(self.layer3(self.layer3(low)))], 1))


@pytest.mark.parametrize(
    ("net", "parts"),
    [
        (Segmenter(), ("layer1", "layer2", "layer3", "layer4")),
        (Classifier(), ("layer1", "layer2")),  # nothing inside them to take apart
        (nn.Sequential(Segmenter()), ("0.layer1", "0.layer2", "0.layer3", "0.layer4")),
        (Deep(), ("encoder.0", *(f"encoder.1.{i}" for i in range(4)))),
        (Twice(), ("layer1", "layer2", "layer4")),
    ],
)
def test_parts_are_the_outermost_stages_in_the_order_they_run(net, parts):
    assert choose_parts(net.eval(), torch.randn(1, 3, 12, 12)) == parts


def test_parts_of_the_shipped_networks_are_their_stages():
    image = torch.randn(1, 3, 64, 64)
    assert choose_parts(models.load("cifar10"), image[..., :32, :32]) == (
        "block1",
        "block2",
        "block3",
    )
    stages = tuple(f"backbone.layer{i}" for i in range(1, 5))
    assert choose_parts(models.load("streets"), image) == (*stages, "aspp")


def test_a_model_without_maps_says_what_is_missing():
    net = randomise(TokenClassifier(), seed=11)
    with pytest.raises(ValueError, match=r"finds none in TokenClassifier.*parts="):
        bestta.prepare(net, stream(2, seed=3), method="ecotta")
    assert all(p.requires_grad for p in net.parameters())
    # Its one layer that has maps can be named.
    bestta.prepare(net, stream(2, seed=3), method="ecotta", parts="patch", warmup_epochs=1)


class Odd(Segmenter):
    """Has stages that take or return something else than one map."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.two, self.unused = Pair(), Two(), stage(3, 3)

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(self.two(self.pair(image)[0], image))


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@pytest.mark.parametrize(
    ("net", "settings", "words"),
    [
        (Segmenter, {"parts": ["layer9"]}, "no module named 'layer9' in Segmenter.*layer1"),
        (Odd, {"parts": ["pair"]}, r"'pair' \(Pair\) returns a tuple; a part of EcoTTA"),
        (Odd, {"parts": ["two"]}, r"'two' \(Two\) takes a tensor .* and a tensor"),
        (Odd, {"parts": ["unused"]}, "'unused' ran 0 times"),
        (Twice, {"parts": ["layer3"]}, "'layer3' ran 2 times"),
        (Segmenter, {"parts": ["layer1", "layer1"]}, "named twice: 'layer1'"),
        (Segmenter, {"parts": ["layer1.0", "layer1"]}, "'layer1.0' lies inside part 'layer1'"),
        (Segmenter, {"kernel": 2}, "odd"),
        (Segmenter, {"kernel": 0}, "kernel"),
        (Segmenter, {"warmup_epochs": 0}, "warmup_epochs"),
        (Segmenter, {"warmup_lr": -1.0}, "warmup_lr"),
        (Segmenter, {"lr": math.nan}, "lr"),
        (Segmenter, {"momentum": 1.0}, "momentum"),
        (Segmenter, {"margin": -0.1}, "margin"),
        (Segmenter, {"lambda_distillation": -1.0}, "lambda_distillation"),
        (Segmenter, {"prior": math.nan}, "prior"),
    ],
)
def test_wrong_parts_and_settings_are_errors_that_say_why(net, settings, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        bestta.prepare(randomise(net(), seed=11), stream(2, seed=3), method="ecotta", **settings)


def test_an_adapter_needs_the_warm_up_and_its_parts():
    net = net_of()
    with pytest.raises(ValueError, match=r"bestta.prepare\(model, images, method='ecotta'\)"):
        bestta.adapt(net, method="ecotta")
    profile = warmed_up(net)
    for settings in ({"parts": ["first"]}, {"kernel": 1}):
        with pytest.raises(ValueError, match=r"prepared with parts=\('first', 'second'\) and kern"):
            bestta.adapt(net, profile, method="ecotta", **settings)


def test_a_bad_image_in_the_first_batch_is_left_out_like_any_other():
    model = randomise(Classifier(), seed=1)
    images = stream(2, seed=2, batch=4)
    bad = [images[0].clone(), images[1]]
    bad[0][1, 0, 0, 0] = float("nan")
    good = [images[0][[0, 2, 3]], images[1]]
    with pytest.warns(UserWarning, match="1 images hold NaN"):
        seen = bestta.prepare(model, bad, method="ecotta", warmup_epochs=1)
    expected = bestta.prepare(model, good, method="ecotta", warmup_epochs=1)
    assert same(dict(seen.prepared["ecotta"]), dict(expected.prepared["ecotta"]))


def test_a_last_batch_of_one_image_with_a_map_of_one_pixel_warms_up_all_the_same():
    model = randomise(Classifier(), seed=1)
    images = [torch.rand(4, 3, 2, 2), torch.rand(1, 3, 2, 2)]
    profile = bestta.prepare(model, images, method="ecotta", warmup_epochs=1)
    assert profile.images == 5
    adapter = bestta.adapt(model, profile, method="ecotta")
    assert bool(adapter(images[1]).isfinite().all())
