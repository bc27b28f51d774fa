"""Suggest the name a user probably meant. Imports the standard library alone."""

import difflib
from collections.abc import Iterable


def did_you_mean(
    name: str, legal_names: Iterable[str], otherwise: str = "", cutoff: float = 0.6
) -> str:
    """Return " Did you mean X?" for the legal name closest to `name`, or else `otherwise`.

    Args:
        cutoff: how similar the two names must be, from 0 to 1.
    """
    closest = difflib.get_close_matches(name, list(legal_names), n=1, cutoff=cutoff)
    return f" Did you mean {closest[0]}?" if closest else otherwise
