"""What is said of names that this release of the package does not have."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import NoReturn

from .text import did_you_mean

# Names of Hugging Face TRL by what they belong to; trainers have a configuration, too.
METHODS = {"Distillation", "ORPO", "CPO", "BCO"}
METHODS |= {"GKD", "XPO", "NashMD", "PRM", "IterativeSFT", "AlignProp", "DDPO"}
OTHERS = {
    *("MergeModelCallback", "WinRateCallback", "get_kbit_device_map", "setup_chat_format"),
    *("AutoModelForCausalLMWithValueHead", "PreTrainedModelWrapper"),
    *("AutoModelForSeq2SeqLMWithValueHead", "BestOfNSampler", "TextEnvironment", "TextHistory"),
    *("BaseJudge", "BasePairwiseJudge", "BaseRankJudge", "HfPairwiseJudge", "PairRMJudge"),
    *("OpenAIPairwiseJudge", "experimental", "extras"),
}
UPSTREAM = OTHERS | {f"{method}{kind}" for method in METHODS for kind in ("Trainer", "Config")}


def refuse(name: str, known: Iterable[str]) -> NoReturn:
    """Say that `trl` has no such name.

    Raises:
        AttributeError: by attribute access, so that `hasattr` is False.
        ImportError: by `from trl import NAME`, where the words of an AttributeError would be lost.
    """
    if name in UPSTREAM:
        trainers = ", ".join(x for x in known if x.endswith("Trainer"))
        hint = f" It is not part of this release, whose trainers are {trainers}."
    else:
        hint = did_you_mean(name, known)
    message = f"module 'trl' has no attribute {name!r}.{hint}"
    from_trl_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    if from_trl_import and not name.startswith("__") and find_spec(f"trl.{name}") is None:
        raise ImportError(message.replace("has no attribute", "has no name"), name="trl")
    raise AttributeError(message)
