"""Every name of a dimension in an annotation is in the legend, and the legend has no other."""

import re
from pathlib import Path

import pytest

from kernels_pallas.shape_check import DIMENSIONS

ROOT = Path(__file__).resolve().parent.parent
ANNOTATION = re.compile(r'\b(?:Float|U?Int\d*|Bool|Shaped|Num)\[\s*[^"\[\]]+?,\s*"([^"]*)"\s*,?\s*\]')


def names():
    """Each name, and a file that uses it."""
    found = {}
    for room in ("kernels_pallas", "mamba_jax"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for annotation in ANNOTATION.findall(path.read_text()):
                for name in re.split(r"[\s*]+", annotation):  # "*batch" and "T*chosen" too
                    found[name.removesuffix("-1")] = str(path.relative_to(ROOT))
    return {name: path for name, path in found.items() if name not in ("", "...") and not name.isdigit()}


@pytest.mark.parametrize("name", sorted(names()))
def test_every_name_is_in_the_legend(name):
    assert name in DIMENSIONS, (
        f"{names()[name]} has a dimension {name!r}: say in kernels_pallas/dimensions.toml what it is"
    )


def test_the_legend_has_no_other():
    assert not DIMENSIONS.keys() - names().keys()
