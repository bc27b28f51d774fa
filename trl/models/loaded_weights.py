"""Loading the weights of a model, and refusing those that lack what is trained or read."""

from collections.abc import Iterable
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel


def from_pretrained(
    model_class: type[PreTrainedModel], name: str, kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model and the report on its weights; errors name the model."""
    try:
        loaded: tuple[PreTrainedModel, dict[str, Any]] = model_class.from_pretrained(
            name, output_loading_info=True, **kwargs
        )
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"The weights of {name!r} have other shapes than its config.json says; the report "
            "above names them. Use the config.json that was saved with them."
        ) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise TypeError(
            f"The model {name!r} does not take all of its model_init_kwargs: {error}."
        ) from error
    return loaded


def check_one_label(name: str, config: PretrainedConfig, class_names: Iterable[str] = ()) -> None:
    """Raise a ValueError if the model is a classifier with several labels: none is a reward.

    `class_names` are those of the model's classes; by default, those that its configuration names.
    """
    class_names = class_names or config.architectures or ()
    is_classifier = any("ForSequenceClassification" in class_name for class_name in class_names)
    if is_classifier and config.num_labels != 1:
        raise ValueError(
            f"The model {name!r} classifies into {config.num_labels} classes (num_labels="
            f"{config.num_labels} in its config.json); a reward model has one label, whose logit "
            "is the reward. Use one that was trained with num_labels=1."
        )


def refuse_random_head(name: str, model: PreTrainedModel, missing: Iterable[str]) -> None:
    """Raise a ValueError if weights of the output projection are missing from the checkpoint."""
    head = model.get_output_embeddings()
    head_weights = {id(weight) for weight in head.parameters()} if head is not None else set()
    weights = dict(model.named_parameters())
    lost = sorted(key for key in missing if key in weights and id(weights[key]) in head_weights)
    if lost:
        raise ValueError(
            f"The model {name!r} has no weights for {', '.join(lost)}, which would be random: it "
            "was saved without its output projection, as by AutoModel. Save it with "
            "AutoModelForCausalLM, or pass a model instead of its name."
        )
