"""Checks of the values of options."""

import re
from dataclasses import dataclass

import pytest

from trl.options import option
from trl.trainer.base.options import check_options


@dataclass
class Ranges:
    share: float = option(0.5, "A share.", gt=0, le=1)
    count: int | None = option(None, "A count.", ge=1, hint="None: all")
    kind: str = option("colocate", "A kind.", choices=("colocate", "server"))
    steps: int = 1


@pytest.mark.parametrize(
    "given", [{}, {"share": 1}, {"share": 1e-9}, {"count": 1}, {"kind": "server"}, {"steps": 0}]
)
def test_values_in_range(given):
    check_options(Ranges(**given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"share": 0}, "share=0 must be above 0 and at most 1."),
        ({"share": 1.5}, "share=1.5 must be above 0 and at most 1."),
        ({"share": float("nan")}, "share=nan must be above 0 and at most 1."),
        ({"share": None}, "share=None must be a number, above 0 and at most 1."),
        ({"share": "0.1"}, "share='0.1' must be a number, above 0 and at most 1."),
        ({"count": 0}, "count=0 must be at least 1 (None: all)."),
        ({"count": 2.0}, "count=2.0 must be an integer; the nearest is 2."),
        ({"count": 0.2}, "count=0.2 must be an integer, at least 1 (None: all)."),
        ({"steps": 1.7}, "steps=1.7 must be an integer; the nearest is 2."),
        ({"steps": float("inf")}, "steps=inf must be an integer."),
        ({"kind": "colocated"}, "kind='colocated' must be one of colocate, server. Did you mean"),
        ({"steps": -1}, "steps=-1 must be at least 0."),
    ],
)
def test_values_out_of_range_are_named_with_what_is_legal(given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_options(Ranges(**given), {"steps": {"ge": 0}})
