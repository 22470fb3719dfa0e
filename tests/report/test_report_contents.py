"""Content of rows: pixels of the decoded PNG, means over blocks, shades of tokens."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from report_cases import parsed_content

pytestmark = pytest.mark.quick

GENERATOR = np.random.default_rng(0)
BYTES = GENERATOR.integers(0, 256, (5, 7, 3), dtype=np.uint8)


def pixels(content) -> np.ndarray:
    (found,) = parsed_content(content).all("img")
    png = base64.b64decode(str(found["src"]).removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(png)))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (BYTES, BYTES),
        (BYTES[:, :, 0], BYTES[:, :, 0]),
        (BYTES[:, :, :1], BYTES[:, :, 0]),
        (np.moveaxis(BYTES, 2, 0), BYTES),
        (torch.from_numpy(BYTES).permute(2, 0, 1), BYTES),
        (torch.from_numpy(BYTES).float() / 255, BYTES),
        (BYTES.astype(np.int64), BYTES),
        (np.dstack([BYTES, BYTES[:, :, :1]]), np.dstack([BYTES, BYTES[:, :, :1]])),
        (Image.fromarray(BYTES), BYTES),
        (Image.fromarray(BYTES[:, :, 0]).convert("P"), np.repeat(BYTES[:, :, :1], 3, axis=2)),
        (np.array([[True, False]]), np.array([[255, 0]])),
        (np.array([[-1.0, 0.0, 3.0]]), np.array([[0, 64, 255]])),
        (torch.tensor([[0.0, 0.5]], dtype=torch.bfloat16), np.array([[0, 128]])),
        (np.array([[7.0, 7.0]]), np.array([[0, 0]])),
    ],
)
def test_pixels_are_those_of_the_image(content, expected):
    np.testing.assert_array_equal(pixels(content), expected)


def test_large_images_are_shrunk_to_means_of_blocks():
    large = GENERATOR.integers(0, 256, (330, 500), dtype=np.uint8)
    found = pixels(large)
    assert found.shape == (83, 125)  # blocks of 4 x 4, of 2 x 4 at the lower edge
    expected = [[large[i : i + 4, j : j + 4].mean() for j in range(0, 500, 4)] for i in range(0, 330, 4)]
    assert np.abs(found - np.array(expected)).max() <= 0.5
    for shape in ((1, 5000), (5000, 1), (161, 160, 3), (1000, 2, 4)):  # long and narrow
        found = pixels(np.full(shape, 200, np.uint8))
        assert max(found.shape[:2]) <= 160, shape
        assert (found == 200).all(), shape


def test_an_image_keeps_its_proportions_and_stands_above_other_fields():
    (image,) = parsed_content(np.zeros((20, 40)), "train row 3").all("img")
    assert (image["width"], image["height"]) == ("96", "48")
    assert (image["alt"], image["class"]) == ("train row 3", "coarse")
    page = parsed_content({"label": 3, "scan": BYTES, "ratio": 0.123456789})
    assert [name for name, _ in page.elements][:2] == ["img", "table"]
    assert page.text == "label3ratio0.123457"


@pytest.mark.parametrize("name", ['" onerror="alert(1)', "'><script>", "a & b\n<"])
def test_names_of_images_stay_text_in_the_attribute(name):
    page = parsed_content({name: BYTES})
    ((tag, found),) = page.elements
    assert tag == "img"
    assert found["alt"] == f"row 0: {name}"
    assert set(found) <= {"src", "alt", "width", "height", "class"}


def test_tokens_are_shaded_by_sign_and_share_of_the_largest_weight():
    page = parsed_content([("a", 2.0), ("b", -2.0), ("c", 1.0), ("d", 0.0), ["e", np.float32(-0.6)]])
    assert [found.get("class") for found in page.all("span")] == ["p7", "n7", "p4", None, "n2"]
    assert [found["title"] for found in page.all("span")][1:3] == ["-2", "+1"]
    assert [found.get("class") for found in parsed_content([("a", 0.0)]).all("span")] == [None]
    assert parsed_content([]).all("span") == []
