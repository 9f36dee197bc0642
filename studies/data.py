"""Data of the studies: from a folder, from a download that is checked, or the digits that scikit-learn brings along.

A set is looked for in the folder that is given, then in PYLOSSES_DATA, then in ~/.cache/pylosses; MNIST and Fashion-MNIST are
downloaded to there. Folders are named as the sets: mnist, fashion-mnist, notmnist, cifar10-jpeg or cifar10, camvid, text.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import pickle
import struct
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CACHE = Path.home() / ".cache" / "pylosses"

ADDRESS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}

#: sha256 of the unpacked files: archives of the same file differ
SHA256 = {
    "mnist/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "mnist/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "mnist/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "mnist/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "fashion-mnist/train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "fashion-mnist/train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "fashion-mnist/t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "fashion-mnist/t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    "notmnist/t10k-images-idx3-ubyte": "8e7f38ae95cc8f48e0986175ffc9137e5007ebcf3d8fdf6656c904eb9dab198b",
    "notmnist/t10k-labels-idx1-ubyte": "5f8e6012f2ce730700d8d05fca098bc47f71d25b890e4bec7ac5ebfd614a4001",
}


class DataMissing(Exception):
    """A set is neither in a folder nor to be had from its address; the message says where it was looked for."""


class Images(NamedTuple):
    """Images and labels of one split."""

    name: str  #: of the data set, as the results name it
    x: Tensor  #: (N, channels, height, width) float32 in [0, 1]
    y: Tensor  #: (N) int64

    def first(self, count: int) -> Images:
        return Images(self.name, self.x[:count], self.y[:count])


class Data:
    """Sets by name. `quick` gives scikit-learn's digits in the place of every set of images."""

    def __init__(self, folder: str | Path | None = None, quick: bool = False) -> None:
        given = folder or os.environ.get("PYLOSSES_DATA")
        self.folders = [Path(given)] if given else []
        self.folders.append(CACHE)
        self.quick = quick
        self.used: list[str] = []  # names of the sets that were read, for the results

    def _use(self, name: str) -> str:
        if name not in self.used:
            self.used.append(name)
        return name

    def where(self, name: str) -> Path:
        for folder in self.folders:
            if (folder / name).is_dir():
                return folder / name
        looked = ", ".join(str(folder / name) for folder in self.folders)
        raise DataMissing(f"no {name}: looked for {looked}. Give a folder with --data or PYLOSSES_DATA, or try --quick")

    def grey(self, name: str) -> tuple[Images, Images]:
        """Train and test images of 28x28: mnist, fashion-mnist, or notmnist, of which there is a test split only."""
        if self.quick:
            return self.digits()
        title = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "notmnist": "notMNIST"}[name]
        splits = []
        for split in ("train", "t10k"):
            if name == "notmnist" and split == "train":
                splits.append(None)
                continue
            x = _idx(self._file(name, f"{split}-images-idx3-ubyte"))
            y = _idx(self._file(name, f"{split}-labels-idx1-ubyte"))
            splits.append(Images(self._use(title), x[:, None].float() / 255, y.long()))
        train, test = splits
        assert test is not None
        return train or test, test

    def colour(self) -> tuple[Images, Images]:
        """CIFAR-10, 32x32, as its authors publish it or as JPEG images."""
        if self.quick:
            return self.digits(side=32, channels=3)
        try:
            folder = self.where("cifar10-jpeg")
        except DataMissing:
            return self._cifar_as_published()
        title = self._use("CIFAR-10 (JPEG)")
        return tuple(_jpegs(title, folder / f"{split}.npz") for split in ("train", "test"))  # type: ignore[return-value]

    def _cifar_as_published(self) -> tuple[Images, Images]:
        folder = self.where("cifar10")
        title = self._use("CIFAR-10")

        def read(*names: str) -> Images:
            batches = [pickle.loads((folder / name).read_bytes(), encoding="bytes") for name in names]
            x = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
            y = np.concatenate([batch[b"labels"] for batch in batches])
            return Images(title, torch.from_numpy(x).float() / 255, torch.from_numpy(y).long())

        return read(*(f"data_batch_{i}" for i in range(1, 6))), read("test_batch")

    def digits(self, side: int = 28, channels: int = 1) -> tuple[Images, Images]:
        """scikit-learn's 1,797 digits of 8x8, magnified; every fifth is a test image."""
        from sklearn.datasets import load_digits

        title = self._use("scikit-learn digits")
        digits = load_digits()
        x = torch.from_numpy(digits.images).float()[:, None] / 16
        x = torch.nn.functional.interpolate(x, size=(side, side), mode="bilinear").expand(-1, channels, -1, -1).contiguous()
        y = torch.from_numpy(digits.target).long()
        test = torch.arange(len(y)) % 5 == 0
        return Images(title, x[~test], y[~test]), Images(title, x[test], y[test])

    def scenes(self, side: tuple[int, int]) -> tuple[Images, Images, list[str]]:
        """CamVid: images of (height, width) `side` and labels for each pixel, -100 where nobody labelled; and the classes.

        `quick` puts three digits on a canvas each: ten classes and an eleventh, the ground.
        """
        if self.quick:
            train, test = self.digits(side=side[0] // 2)
            splits = [_canvas(split, side) for split in (train, test)]
            return splits[0], splits[1], [*map(str, range(10)), "ground"]
        folder, title = self.where("camvid"), self._use("CamVid")
        names = "sky building pole road pavement tree sign fence car pedestrian bicyclist".split()
        return _scenes(title, folder / "train", side), _scenes(title, folder / "test", side), names

    def text(self) -> str:
        """The State of the Union addresses; for `quick`, what Python says of itself."""
        if self.quick:
            with contextlib.redirect_stdout(None):
                import this

            self._use("The Zen of Python")
            return "".join(this.d.get(letter, letter) for letter in this.s) * 20
        path = self.where("text") / "state_of_the_union.txt.gz"
        self._use("State of the Union addresses")
        return gzip.decompress(path.read_bytes()).decode()

    def _file(self, name: str, file: str) -> bytes:
        """Content of a file of a set, unpacked and checked; downloaded where no folder has it."""
        for folder in self.folders:
            for path in (folder / name / file, folder / name / f"{file}.gz"):
                if path.exists():
                    return _checked(f"{name}/{file}", path.read_bytes())
        if name not in ADDRESS:
            self.where(name)
            raise DataMissing(f"no {name}/{file} in {', '.join(map(str, self.folders))}")
        address = f"{ADDRESS[name]}{file}.gz"
        try:
            with urllib.request.urlopen(address, timeout=60) as response:
                packed = response.read()
        except OSError as error:
            raise DataMissing(f"no {name} in {', '.join(map(str, self.folders))}, and {address} gives: {error}") from error
        content = _checked(f"{name}/{file}", packed)
        path = CACHE / name / f"{file}.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed)
        return content


def _checked(name: str, content: bytes) -> bytes:
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ValueError(f"{name} is not the published file: sha256 {found}, expected {SHA256[name]}")
    return content


def _idx(content: bytes) -> Tensor:
    """Array of an IDX file of bytes: two zeros, type 8, dimensions, their sizes as big-endian int32."""
    assert content[:3] == b"\0\0\x08"
    dimensions = content[3]
    shape = struct.unpack(f">{dimensions}i", content[4 : 4 + 4 * dimensions])
    return torch.frombuffer(bytearray(content[4 + 4 * dimensions :]), dtype=torch.uint8).reshape(shape)


def _jpegs(title: str, path: Path) -> Images:
    from PIL import Image

    with np.load(path) as file:
        content, offsets, labels = file["jpeg"].tobytes(), file["offsets"], file["labels"]
    images = [np.asarray(Image.open(io.BytesIO(content[a:b]))) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return Images(title, x.contiguous().float() / 255, torch.from_numpy(labels).long())


def _scenes(title: str, folder: Path, side: tuple[int, int]) -> Images:
    from PIL import Image

    images, labels = [], []
    for path in sorted(folder.glob("*.jpg")):
        size = side[1], side[0]
        images.append(np.asarray(Image.open(path).convert("RGB").resize(size, Image.Resampling.BILINEAR)))
        labels.append(np.asarray(Image.open(path.with_suffix(".png")).resize(size, Image.Resampling.NEAREST)))
    x, y = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), torch.from_numpy(np.stack(labels)).long()
    return Images(title, x.contiguous().float() / 255, torch.where(y == 11, -100, y))


def _canvas(digits: Images, side: tuple[int, int]) -> Images:
    """Three digits side by side, above or below the middle; a pixel with ink has the digit's label, others are ground."""
    count, height, width = len(digits.x) // 3, *side
    generator = torch.Generator().manual_seed(0)
    x, y = torch.zeros(count, 1, height, width), torch.full((count, height, width), 10)
    high, wide = digits.x.shape[2], min(digits.x.shape[3], width // 3)
    for place in range(3):
        ink = torch.nn.functional.interpolate(digits.x[place * count : (place + 1) * count], size=(high, wide))
        label = digits.y[place * count : (place + 1) * count]
        for i, top in enumerate(torch.randint(0, height - high + 1, (count,), generator=generator).tolist()):
            at = slice(top, top + high), slice(place * (width // 3), place * (width // 3) + wide)
            x[i, 0][at] = ink[i, 0]
            y[i][at] = torch.where(ink[i, 0] > 0.3, label[i], y[i][at])
    return Images(digits.name, x.expand(-1, 3, -1, -1).contiguous(), y)
