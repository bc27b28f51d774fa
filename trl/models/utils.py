"""Helpers for rollout functions, under the module name that scripts import."""

from . import reference, unwrap

create_reference_model = reference.create_reference_model
unwrap_model_for_generation = unwrap.policy_for_inference
