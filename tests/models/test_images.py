"""Preparation of images for a model, as preprocessor_config.json says."""

import json

import numpy as np
import pytest
import tiny_towers as tiny
from implementations import assert_same_rows
from model_folders import refused
from PIL import Image

from fastattn import models

RNG = np.random.default_rng(3)
SIZE = tiny.SIZE


def drawn(height, width):
    """Large squares of one colour, whose values change where an image is resized."""
    small = RNG.integers(0, 256, (height // 5 + 1, width // 5 + 1, 3), np.uint8)
    return np.kron(small, np.ones((5, 5, 1), np.uint8))[:height, :width]


def images_of(folder, **changes):
    """The processor of a folder, its file changed."""
    tiny.write(folder, "clip", processor={**tiny.PROCESSOR, **changes})
    return models.load(folder).images


def normed(image):
    """The definition of the last step, of an array of integers."""
    return ((image.astype(float) / 255 - tiny.MEAN) / tiny.STD).transpose(2, 0, 1)


def resized(image, width, height, resample=3):
    return np.asarray(Image.fromarray(image).resize((width, height), resample))


def close(got, expected):
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_the_shorter_edge_and_the_middle(tmp_path):
    images = images_of(tmp_path)
    wide, high = drawn(40, 67), drawn(51, 30)
    close(images(wide, np.dtype("f4")), normed(resized(wide, 33, 20)[:, 6:26]))
    close(images(high, np.dtype("f4")), normed(resized(high, 20, 34)[7:27]))
    close(images(wide[:20, :20], np.dtype("f4")), normed(wide[:20, :20]))
    small = drawn(7, 7)
    close(images(small, np.dtype("f4")), normed(resized(small, 20, 20)))


def test_images_of_too_many_pixels(tmp_path):
    tiny.write(tmp_path, "clip")
    model, zero = models.load(tmp_path), np.zeros((1, 1, 3), np.uint8)
    expected = "; expected sides of at most 65535, and at most 89478485 pixels"
    for shape in ((65_536, 1), (1, 65_536), (9460, 9460)):
        came = rf"encode\(\): sentences has an image of {shape[0]} by {shape[1]}{expected}"
        for dtype in (np.uint8, np.float16):
            with pytest.raises(ValueError, match=came):
                model.encode(np.broadcast_to(zero.astype(dtype), (*shape, 3)))
    with pytest.raises(ValueError, match="an image of 3 by 65536; expected sides"):
        model.encode([Image.new("1", (65_536, 3))])
    size = {"height": 1, "width": 65_535}
    images = images_of(tmp_path, size=size)
    with pytest.raises(ValueError, match=rf"an image of 9000 by 1 is resized to 1 by 65535 by .*{expected}"):
        images(np.zeros((9000, 1, 3), np.uint8), np.dtype("f4"))


@pytest.mark.parametrize("size", [SIZE, {"shortest_edge": SIZE}, {"shortest_edge": SIZE, "height": None}])
def test_forms_of_sizes(size, tmp_path):
    image = drawn(40, 67)
    expected = images_of(tmp_path)(image, np.dtype("f4"))
    for crop in (SIZE, {"height": SIZE, "width": SIZE}):
        got = images_of(tmp_path, size=size, crop_size=crop)(image, np.dtype("f4"))
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("resample", range(6))
def test_height_and_width(resample, tmp_path):
    size = {"height": SIZE, "width": SIZE}
    images = images_of(tmp_path, size=size, do_center_crop=False, resample=resample)
    image = drawn(40, 67)
    close(images(image, np.dtype("f4")), normed(resized(image, SIZE, SIZE, resample)))


def test_an_image_that_is_smaller_than_its_middle(tmp_path):
    images = images_of(tmp_path, do_resize=False)
    for height, width in ((7, 33), (19, 20), (20, 14), (3, 4)):
        image = drawn(height, width)
        top, left = -(-(SIZE - height) // 2), max(0, -(-(SIZE - width) // 2))
        whole = np.zeros((SIZE, max(SIZE, width), 3), np.uint8)
        whole[top : top + height, left : left + width] = image
        begin = (whole.shape[1] - SIZE) // 2
        close(images(image, np.dtype("f4")), normed(whole[:, begin : begin + SIZE]))


def test_no_normalisation_and_another_scale(tmp_path):
    image = drawn(SIZE, SIZE)
    plain = images_of(tmp_path, do_normalize=False, image_mean="none")
    close(plain(image, np.dtype("f4")), image.transpose(2, 0, 1) / 255)
    images = images_of(tmp_path, rescale_factor=1 / 127.5, image_mean=1, image_std=1.0)
    close(images(image, np.dtype("f4")), image.transpose(2, 0, 1) / 127.5 - 1)
    close(images(image / 255, np.dtype("f4")), image.transpose(2, 0, 1) / 127.5 - 1)
    assert images(image, np.dtype("f8")).dtype == np.float64


def test_images_of_pillow_and_floats(tmp_path):
    tiny.write(tmp_path, "clip")
    model = models.load(tmp_path)
    image = drawn(40, 67)
    expected = model.encode(image)
    assert_same_rows(model.encode(Image.fromarray(image)), expected)
    assert_same_rows(model.encode(image / 255), expected)
    assert_same_rows(model.encode([Image.fromarray(image), image]), [expected] * 2)
    assert_same_rows(model.encode(np.ascontiguousarray(image[:, ::-1])[:, ::-1]), expected)
    grey = Image.fromarray(image).convert("L")
    assert_same_rows(model.encode(grey), model.encode(np.stack([np.asarray(grey)] * 3, axis=2)))
    clear = Image.fromarray(image).convert("RGBA")
    assert_same_rows(model.encode(clear), expected)


def test_the_newer_file_counts_where_there_are_both(tmp_path):
    image = drawn(40, 67)
    expected = images_of(tmp_path)(image, np.dtype("f4"))
    newer = {"image_processor": tiny.PROCESSOR, "processor_class": "CLIPProcessor"}
    tiny.write(tmp_path, "clip", processor={"crop_size": 3})
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    np.testing.assert_array_equal(models.load(tmp_path).images(image, np.dtype("f4")), expected)
    (tmp_path / "preprocessor_config.json").unlink()
    np.testing.assert_array_equal(models.load(tmp_path).images(image, np.dtype("f4")), expected)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    model = models.load(tmp_path)
    assert model.images is None
    with pytest.raises(models.ModelError, match=r"no preprocessor_config\.json and no processor_config\.j"):
        model.encode([image])


def test_what_is_missing_is_as_in_transformers(tmp_path):
    """224 pixels, which the tiny model does not take."""
    tiny.write(tmp_path, "clip", processor={})
    refused(tmp_path, "'crop_size' is 224 by 224; expected the model's, 20 by 20")
    tiny.write(tmp_path, "siglip", processor={})
    refused(tmp_path, "'size' is 224 by 224; expected the model's, 20 by 20")
    tiny.write(tmp_path, "siglip", processor={"size": {"height": SIZE, "width": SIZE}})
    images = models.load(tmp_path).images
    assert (images.resample, images.crop, images.mean, images.std) == (3, None, (0.5,) * 3, (0.5,) * 3)


WRONG = [
    ({"size": {"longest_edge": 20}}, "'size' is {'longest_edge': 20}; expected height and width, or sh"),
    ({"size": "20"}, "'size' is '20'; expected height and width, or shortest_edge, integers from 1"),
    ({"size": {"shortest_edge": 0}}, "expected height and width, or shortest_edge, integers from 1 to 65535"),
    ({"size": {"height": 20, "width": True}}, "expected height and width, or shortest_edge, integers"),
    ({"crop_size": {"shortest_edge": 20}}, "'crop_size' is {'shortest_edge': 20}; expected height and widt"),
    ({"crop_size": 19}, "'crop_size' is 19 by 19; expected the model's, 20 by 20"),
    ({"do_resize": "yes"}, "'do_resize' is 'yes'; expected true or false"),
    ({"do_rescale": False}, "'do_rescale' is False; only True is supported"),
    ({"do_pad": True}, "'do_pad' is True; only False is supported"),
    ({"resample": 6}, "'resample' is 6; expected a filter of Pillow, 0 to 5"),
    ({"resample": "bicubic"}, "'resample' is 'bicubic'; expected an integer of at least 0"),
    ({"rescale_factor": 0}, "'rescale_factor' is 0; expected a number above 0"),
    ({"image_mean": [0.5]}, "'image_mean' is [0.5]; expected 3 numbers"),
    ({"image_std": [1, 1, "1"]}, "'image_std' is [1, 1, '1']; expected 3 numbers"),
    ({"image_std": [1, 1, 0]}, "'image_std' is [1.0, 1.0, 0.0]; expected no 0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_files_that_say_nothing_known(changes, message, tmp_path):
    tiny.write(tmp_path, "clip", processor={**tiny.PROCESSOR, **changes})
    assert "preprocessor_config.json: " in refused(tmp_path, message)


def test_an_image_that_does_not_become_square(tmp_path):
    tiny.write(tmp_path, "clip", processor={**tiny.PROCESSOR, "do_center_crop": False})
    model = models.load(tmp_path)
    assert model.encode(drawn(40, 40)).shape == (20,)
    with pytest.raises(ValueError, match=r"makes 20 by 40 of an image; expected the model's size, 20 by 20"):
        model.encode(drawn(40, 80))


def test_without_pillow(tmp_path, python):
    """Images that have the model's size do not need it, and neither do those that are only cut."""
    tiny.write(tmp_path, "clip")
    code = f"""
import sys
sys.modules["PIL"] = None
import numpy as np
from fastattn import models
model = models.load({str(tmp_path)!r})
assert model.encode(np.zeros((20, 20, 3))).shape == (20,)
assert model.encode(np.zeros((20, 30, 3), np.uint8)).shape == (20,)
try:
    model.encode(np.zeros((9, 30, 3)))
except ImportError as error:
    print(error)
"""
    assert "need Pillow: pip install pillow, or fastattn with the extra 'images'" in python(code).stdout
