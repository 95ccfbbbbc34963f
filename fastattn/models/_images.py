"""Images to pixels: resized, cut and normalised as the folder says."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastattn._args.errors import needed, wrong_dtype, wrong_shape, wrong_type
from fastattn._args.types import Array, Shape
from fastattn._args.values import as_array, is_float
from fastattn.models._files import Config, ModelError

_WHOLE = 255  # of a pixel in integers
_CHANNELS = 3
_NEW, _OLD = "processor_config.json", "preprocessor_config.json"  # the first one has a table of it
_MOST_SIDE, _MOST_PIXELS = 65535, 89_478_485  # of JPEG, and of what Pillow opens without a warning
_FITTING = f"sides of at most {_MOST_SIDE}, and at most {_MOST_PIXELS} pixels"
EXPECTED = "an array (height, width, 3) or an image of Pillow"


@dataclass(frozen=True, slots=True)
class Images:
    """Preparation of images for the model."""

    path: Path | str  # the file that says so
    image_size: int  # height and width that the model takes
    size: tuple[int, int] | int | None  # height and width, or the shorter of them; None: as it is
    crop: tuple[int, int] | None  # height and width of the middle that is kept
    resample: int  # one of Pillow's filters
    scale: float  # of pixels from 0 to 255
    mean: tuple[float, ...]  # of each channel, subtracted after that
    std: tuple[float, ...]  # what it is divided by then

    @classmethod
    def of(cls, folder: Path, image_size: int, usual: Mapping[str, Any]) -> Images | None:
        """Read it from the folder, with defaults from `usual`; None if there is no such file."""
        nested = Config(folder / _NEW, optional=True)
        if nested.values.get("image_processor") is not None:
            config = nested.inner("image_processor", usual)
        elif (folder / _OLD).exists():
            config = Config(folder / _OLD)
            given = {name: value for name, value in config.values.items() if value is not None}
            config.values = {**usual, **given}
        else:
            return None
        config.refuse(do_rescale=True, do_pad=False)
        size = _size(config, "size", "do_resize", shorter=True)
        crop = _size(config, "crop_size", "do_center_crop")
        mean, std = (0.0,) * _CHANNELS, (1.0,) * _CHANNELS
        if config.get("do_normalize", bool, True):
            mean, std = _numbers(config, "image_mean"), _numbers(config, "image_std")
            if 0 in std:
                raise config.wrong("image_std", list(std), "no 0")
        resample = config.size("resample", low=0)
        if resample > 5:
            raise config.wrong("resample", resample, "a filter of Pillow, 0 to 5")
        found = size if crop is None else crop
        if isinstance(found, tuple) and found != (image_size, image_size):
            name = "size" if crop is None else "crop_size"
            expected = f"the model's, {image_size} by {image_size}"
            raise ModelError(f"{config.path}: {name!r} is {found[0]} by {found[1]}; expected {expected}")
        scale = config.number("rescale_factor", 1 / _WHOLE)
        return cls(config.path, image_size, size, crop, resample, scale, mean, std)

    def __call__(self, image: Any, dtype: np.dtype[Any]) -> Array:
        """The pixels in `dtype`, float32 or float64, of a checked image: (3, image_size, image_size)."""
        if is_pillow(image):
            image = np.asarray(image.convert("RGB"))
        wanted = self._wanted(*image.shape[:2])
        found = wanted if self.crop is None else self.crop
        if found != (self.image_size,) * 2:
            came = f"{self.path} makes {found[0]} by {found[1]} of an image"
            expected = f"the model's size, {self.image_size} by {self.image_size}"
            raise ValueError(f"encode(): {came}; expected {expected}")
        image = self._cut(image, wanted, found)
        scale = self.scale if image.dtype == np.uint8 else self.scale * _WHOLE
        pixels = (image * np.float64(scale)).astype(dtype)
        normed: Array = (pixels - np.array(self.mean, dtype)) / np.array(self.std, dtype)
        return normed.transpose(2, 0, 1)

    def _wanted(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which an image is resized."""
        if self.size is None:
            return height, width
        if isinstance(self.size, tuple):
            return self.size
        longer = self.size * max(height, width) // min(height, width)
        return (self.size, longer) if height <= width else (longer, self.size)

    def _cut(self, image: Array, wanted: tuple[int, int], found: tuple[int, int]) -> Array:
        """The middle of `image` at the size `wanted`, of the size `found`: as it is, or in integers."""
        out = np.zeros((*found, _CHANNELS), image.dtype)
        (rows, to_rows), (columns, to_columns) = map(_middle, found, wanted)
        height, width = image.shape[:2]
        if (height, width) != wanted:
            if image.dtype != np.uint8:
                image = np.rint(image.astype(np.float64) * _WHOLE).astype(np.uint8)
                out = out.astype(np.uint8)
            between = height * wanted[1], wanted[0] * width  # Pillow's passes
            if max(math.prod(wanted), *between) > _MOST_PIXELS:
                came = f"an image of {height} by {width} is resized to {wanted[0]} by {wanted[1]}"
                raise ValueError(f"encode(): {came} by {self.path}; expected {_FITTING}")
            how = "pip install pillow, or fastattn with the extra 'images'"
            library = needed("PIL.Image", "images of another size than the model's need Pillow", how)
            whole = library.fromarray(np.ascontiguousarray(image))
            image = np.asarray(whole.resize(wanted[::-1], self.resample))
        out[to_rows, to_columns] = image[rows, columns]
        return out


def is_pillow(x: Any) -> bool:
    """Tell whether `x` is an image of Pillow, which is then imported."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(x, module.Image)


def checked(name: str, image: Any) -> Any:
    """`image`, or an error that names it the argument `name`: an image of Pillow, or an array."""
    if is_pillow(image):
        _require_fitting(name, image.size[::-1])
        return image
    if not hasattr(image, "__array__"):  # lists of numbers are texts that somebody has mistaken
        raise wrong_type(name, image, f"a string, or {EXPECTED}")
    image = as_array(name, image)
    if image.ndim != 3 or image.shape[2] != _CHANNELS:
        raise wrong_shape(name, image, f"(height, width, {_CHANNELS})")
    if image.dtype != np.uint8 and not is_float(image.dtype):
        raise wrong_dtype(name, image, "uint8, from 0 to 255, or floats from 0 to 1")
    _require_fitting(name, image.shape[:2])
    if image.dtype != np.uint8:
        image = image.astype(np.float64)
        if not (image.min() >= 0 and image.max() <= 1):
            came = f"values from {image.min():.6g} to {image.max():.6g}"
            expected = "0 to 1 in floats, 0 to 255 in uint8"
            raise ValueError(f"(): {name} has an image with {came}; expected {expected}")
    return image


def _require_fitting(name: str, size: Shape) -> None:
    """Raise unless an image of this height and width has pixels, and not too many."""
    if 0 in size:
        raise ValueError(f"(): {name} has an image without pixels; expected at least one")
    if max(size) > _MOST_SIDE or math.prod(size) > _MOST_PIXELS:
        raise ValueError(f"(): {name} has an image of {size[0]} by {size[1]}; expected {_FITTING}")


def _middle(wanted: int, there: int) -> tuple[slice, slice]:
    """The part of an axis that is kept, and its place in the result."""
    # transformers rounds so: an image that is smaller by an odd number lies nearer to the end.
    begin = (there - wanted) // 2 if there >= wanted else -math.ceil((wanted - there) / 2)
    first, last = max(begin, 0), min(begin + wanted, there)
    return slice(first, last), slice(first - begin, last - begin)


def _size(config: Config, name: str, asked: str, shorter: bool = False) -> Any:
    """Height and width, or with `shorter` perhaps one number for the shorter of them; None if not `asked`."""
    if not config.get(asked, bool, False):
        return None
    value, sides = config.values.get(name), ("height", "width")
    if isinstance(value, dict):
        value = {key: side for key, side in value.items() if side is not None}
        if shorter and list(value) == ["shortest_edge"]:
            value = value["shortest_edge"]
        elif set(value) == set(sides):
            value = tuple(value[side] for side in sides)
    elif not shorter:
        value = (value, value)
    parts = value if isinstance(value, tuple) else (value,)
    if not all(type(part) is int and 1 <= part < 2**16 for part in parts):
        expected = "height and width" + (", or shortest_edge" if shorter else "")
        raise config.wrong(name, config.values.get(name), f"{expected}, integers from 1 to 65535")
    return value


def _numbers(config: Config, name: str) -> tuple[float, ...]:
    """A number of each channel."""
    value = config.values.get(name)
    numbers: list[Any] = value if isinstance(value, list) else [value] * _CHANNELS
    if len(numbers) != _CHANNELS or not all(type(x) in (int, float) and abs(x) < 1e30 for x in numbers):
        raise config.wrong(name, value, f"{_CHANNELS} numbers")
    return tuple(map(float, numbers))
