"""What does a ticket of channels cost a VGG in accuracy? The original Early-Bird tickets, on Fashion-MNIST.

    python -m benchmarks.quality.vgg --data FOLDER --out DIR

As published (You et al. 2020): SGD with momentum, rate 0.1, divided by 10 after a half and three
quarters of the epochs; 1e-4 sign(gamma) added to the gradient of every BatchNorm scale; masks of
channels before each epoch; once five of them agree the ticket is drawn, and training continues from
there with what is kept. Where a ticket would take all channels of a layer, it is not drawn, and
looked for again after the next epoch. Rows are kept after each run; what is there already is not
run again.
"""

import argparse
import sys
import time
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

import samo
from benchmarks.quality import runs, vgg_page
from benchmarks.quality.images import Images, augmented, centred, read_images
from benchmarks.quality.tickets import ChannelTickets
from samo.errors import MaskError, SamoError

__all__ = ["CONTENDERS", "Run", "Settings", "main", "train", "vgg"]

MOMENTUM, WEIGHT_DECAY, L1 = 0.9, 1e-4, 1e-4

CONTENDERS: Final[dict[str, tuple[str, float | None, bool]]] = {
    "unpruned": ("unpruned", None, False),
    "unpruned-l1": ("unpruned, L1 on scales", None, True),
    "ticket-30": ("ticket 30 %", 0.3, True),
    "ticket-50": ("ticket 50 %", 0.5, True),
    "ticket-70": ("ticket 70 %", 0.7, True),
}
"""Title, fraction of the channels that is pruned, and whether scales are drawn to 0."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs have in common."""

    width: int = 64
    """Channels of the first layer; the last have eight times as many."""
    epochs: int = 30
    batch: int = 256
    lr: float = 0.1
    spared: int = 0
    """How many of the last BatchNorms keep all of their channels."""
    images: int = 60_000
    """Of the training set, and at most as many of the test set."""


QUICK: Final = {"width": 4, "epochs": 12, "batch": 16, "images": 32}


def vgg(width: int) -> nn.Sequential:
    """Return a VGG-11 for images of 32 x 32: eight convolutions with BatchNorm, one linear layer."""
    layers: list[nn.Module] = []
    before = 1
    for size in (1, "pool", 2, "pool", 4, 4, "pool", 8, 8, "pool", 8, 8, "pool"):
        if isinstance(size, str):
            layers.append(nn.MaxPool2d(2))
            continue
        after = width * size
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
        before = after
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(before, 10))
    for module in model:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 0.5)  # small, so that they come apart sooner
    return model


class Run:
    """A VGG in training: dense at first, and on compressed state once `compress` was called."""

    def __init__(
        self, settings: Settings, images: Images, seed: int, device: torch.device, *, has_l1: bool
    ) -> None:
        self.settings = settings
        self.images = images
        self.masks: samo.Masks | None = None
        torch.manual_seed(seed)
        self.model = vgg(settings.width).to(device)
        self.norms = [n for n, m in self.model.named_modules() if isinstance(m, nn.BatchNorm2d)]
        self.opt = self._new_optimizer(self.model.parameters())
        self.epoch = 0
        self.curve: list[list[float]] = []  # epochs, accuracy in percent
        self._has_l1 = has_l1
        self._generator = torch.Generator(device).manual_seed(seed)

    def train_epoch(self) -> None:
        """Train one epoch, with the order and windows of the seed."""
        settings = self.settings
        falls = sum(self.epoch >= part * settings.epochs for part in (0.5, 0.75))
        for group in self.opt.param_groups:
            group["lr"] = settings.lr * 0.1**falls
        self.model.train()
        train = self.images.train
        places_N = torch.randperm(len(train), generator=self._generator, device=train.device)
        for places_B in places_N.split(settings.batch):
            if len(places_B) < settings.batch:
                break  # a rest of one image has no statistics
            images_B1HW = augmented(train[places_B], self._generator)
            F.cross_entropy(self.model(images_B1HW), self.images.train_labels[places_B]).backward()
            if self._has_l1:
                self._add_l1_()
            self.opt.step()
            self.opt.zero_grad()
        self.epoch += 1
        self.curve.append([self.epoch, self.accuracy()])

    def compress(self, masks: samo.Masks) -> None:
        """Prune the channels, and continue with new gradients and momentum for what is kept."""
        samo.compress_(self.model, masks)
        self.masks = masks
        self.opt = self._new_optimizer(self.model.parameters())

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the accuracy on the test images, in percent."""
        self.model.eval()
        right = torch.zeros((), device=self.images.test.device)
        pairs = zip(self.images.test.split(1000), self.images.test_labels.split(1000))
        for images_BHW, labels_B in pairs:
            right += (self.model(centred(images_BHW)).argmax(1) == labels_B).sum()
        return 100 * float(right) / len(self.images.test_labels)

    def _new_optimizer(self, params: Any) -> torch.optim.Optimizer:
        settings = {"lr": self.settings.lr, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
        return torch.optim.SGD(params, **settings)

    @torch.no_grad()
    def _add_l1_(self) -> None:
        """Add the sub-gradient of the penalty to each scale: the whole one, or what is kept of it."""
        for name in self.norms:
            scale = self.model.get_parameter(f"{name}.weight")
            assert scale.grad is not None
            scale.grad.add_(scale.detach().sign(), alpha=L1)


def train(job: runs.Job, settings: Settings, data: Path, device: str) -> runs.Row:
    """Train one contender with one seed, and return its row."""
    name, seed, _ = job
    title, sparsity, has_l1 = CONTENDERS[name]
    place = torch.device(device)
    run = Run(settings, read_images(data, place, settings.images), seed, place, has_l1=has_l1)
    num_params = sum(p.numel() for p in run.model.parameters())
    begun = time.perf_counter()
    drawn, ticket, failure = None, "", None
    if sparsity is not None:
        spared = run.norms[len(run.norms) - settings.spared :]
        tickets = ChannelTickets(run.model, sparsity, spared=spared)
        while run.epoch < settings.epochs:
            try:
                if masks := tickets.observe():
                    drawn, ticket, failure = run.epoch, tickets.reason, None
                    run.compress(masks)
                    break
                failure = f"no ticket in {settings.epochs} epochs: {tickets.reason}"
            except MaskError as error:  # settled, but a layer would lose all: look again later
                failure = f"no ticket in {settings.epochs} epochs: {error}"
            run.train_epoch()
    while run.epoch < settings.epochs and failure is None:
        run.train_epoch()
    pruned = {} if run.masks is None else dict(run.masks)
    channels = [pruned[f"{norm}.weight"] for norm in run.norms if f"{norm}.weight" in pruned]
    return {
        "contender": name,
        "title": title,
        "seed": seed,
        "accuracy": None if failure else run.curve[-1][1],
        "curve": run.curve,
        "num_params": num_params,
        "pruned_params": sum(mask.numel - mask.kept for mask in pruned.values()),
        "num_channels": sum(run.model.get_submodule(n).num_features for n in run.norms),
        "pruned_channels": sum(mask.numel - mask.kept for mask in channels),
        "fewest_channels": min((mask.kept for mask in channels), default=None),
        "drawn_epoch": drawn,
        "ticket": ticket,
        "failure": failure,
        # Weights, gradients and momentum in fp32; compressed, with a bitmap for each mask.
        "state_bytes": 12 * num_params
        if run.masks is None
        else samo.ledger(run.model, run.opt).predicted_bytes,
        "train_s": time.perf_counter() - begun,
    }


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs.add_run_flags(parser, list(CONTENDERS))
    parser.add_argument("--data", type=Path, help="folder with the four idx files, gzip or not")
    for field in fields(Settings):
        parser.add_argument(
            f"--{field.name}", type=field.type, help=f"{field.default} if not given"
        )
    options = parser.parse_args()
    try:
        _go(options, parser)
    except SamoError as error:
        sys.exit(f"error: {error}")


def _go(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.page_only:
        with runs.kept_rows(options.out, None) as kept:
            vgg_page.write(options.out, kept.rows, list(CONTENDERS))
        return
    if options.data is None:
        parser.error("--data is needed: a folder with the four idx files of Fashion-MNIST")
    device = torch.device(options.device)
    read_images(options.data, torch.device("cpu"), 1)  # refused here rather than in every run
    typed = {field.name: getattr(options, field.name) for field in fields(Settings)}
    given: dict[str, Any] = dict(QUICK) if options.quick else {}
    settings = Settings(**(given | {k: v for k, v in typed.items() if v is not None}))
    names = options.only or list(CONTENDERS)
    jobs = [runs.Job(name, seed) for seed in options.seeds for name in names]
    with runs.kept_rows(options.out, settings) as kept:
        work = partial(train, settings=settings, data=options.data, device=options.device)
        try:
            runs.finish(
                kept,
                lambda _: jobs,
                work,
                device=device,
                parallel=options.parallel,
                minutes=options.minutes,
            )
        finally:
            if kept.rows:
                vgg_page.write(options.out, kept.rows, list(CONTENDERS))
                print(f"page: {options.out / 'README.md'}")


if __name__ == "__main__":
    main()
