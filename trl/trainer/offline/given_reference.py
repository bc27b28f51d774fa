"""A reference policy that is passed to a trainer instead of being made of the policy."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...models.loading import disable_dropout_in_model, load_policy
from ..base.policy import init_options
from .offline_config import PreferenceConfig


def given_reference(given: Any, model: Any, args: PreferenceConfig) -> PreTrainedModel | None:
    """Load the reference, if one was passed; None if not.

    Args:
        given: a model or its name.
        model: what is trained, as it was passed.
        args (`PreferenceConfig`): options.

    Raises:
        TypeError: for anything else.
        ValueError: if it is the model that is trained.
    """
    if given is None:
        return None
    if given is model and not isinstance(given, str):
        raise ValueError(
            "ref_model is the model that is trained, so it would move along. Leave it out: a "
            "frozen copy is made."
        )
    if isinstance(given, str):
        options: Any = args.ref_model_init_kwargs or init_options(args)
        given = load_policy(given, options, args.trust_remote_code)
    if not isinstance(given, nn.Module) or not hasattr(given, "config"):
        raise TypeError(
            f"ref_model must be a name or a transformers model, not {type(given).__name__}."
        )
    disable_dropout_in_model(given)
    return given
