"""The keys of a config are those of the signatures, and only what YAML can say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import nn

from trak_lite import Attributor
from trak_lite.cli.configs import run_keys
from trak_lite.cli.keys import keys_of, plain_type
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers.normalization import Normalization

pytestmark = pytest.mark.quick

KEYS = {key.name: key for key in run_keys()}


@pytest.mark.parametrize(
    ("annotation", "plain"),
    [
        (int, int),
        (str | torch.device, str),
        (str | Callable[..., Any], str),
        (float | Literal["auto"], float | Literal["auto"]),
        (Sequence[int] | None, list[int] | None),
        (tuple[float, ...], list[float]),
        (str | type[nn.Module] | Sequence[str | type[nn.Module]] | None, str | list[str] | None),
        (Callable[..., Any] | None, None),
        (Sequence[Any], None),
        (nn.Module, None),
        (Literal["none"] | Normalization, Literal["none"]),
        (Any, None),
    ],
)
def test_only_the_plain_part_of_an_annotation_is_kept(annotation: Any, plain: Any) -> None:
    assert plain_type(annotation) == plain


def test_every_argument_of_the_attributor_is_a_key_with_its_default_but_what_only_python_can_say() -> None:
    parameters = dict(inspect.signature(Attributor.__init__).parameters)
    for name in ("self", "model", "collate"):
        del parameters[name]

    assert parameters.keys() <= KEYS.keys()
    assert {name: KEYS[name].default for name in parameters} == {
        name: parameter.default for name, parameter in parameters.items()
    }


def test_the_methods_arguments_are_keys_of_their_section() -> None:
    assert KEYS["train_data.batch_size"].type == int | None
    assert KEYS["target_data.indices"].type == list[int] | None
    assert KEYS["train_data.name"].type == str | None
    assert KEYS["featurize.append"].type is bool
    assert KEYS["score.method"].default is None
    assert KEYS["verify.budget"].default == 10
    assert (
        not {
            "verify.texts",
            "verify.strata",
            "verify.scores",
            "verify.targets",
            "score.data",
            "train_data.data",
        }
        & KEYS.keys()
    )


def test_the_help_is_that_of_the_docstrings() -> None:
    assert KEYS["proj_dim"].help.startswith("K, the number of features per stored row")
    assert "random subsets" in KEYS["verify.budget"].help


def test_annotations_that_cannot_be_read_are_refused() -> None:
    def build_model(width: Missing) -> None:  # noqa: F821
        """Nothing."""

    with pytest.raises(InvalidInputError, match=r"annotations of build_model\(\) cannot be read.*Missing"):
        keys_of(build_model)


def test_an_argument_without_annotation_has_the_type_of_its_default() -> None:
    def build_model(width=3, model=None):
        """Nothing."""

    assert [(key.name, key.type) for key in keys_of(build_model)] == [("width", int)]
