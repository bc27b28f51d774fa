"""Bytes that a rank holds while it generates; run it to measure the table of the documentation.

OMP_NUM_THREADS=1 python tests/distributed/generation_peaks.py [ENGINE...]
"""

import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "trainer")]

from engines import SHARDED, finish, launch, report, use  # noqa: E402
from held_bytes import config_file, live_bytes, pauses  # noqa: E402
from online_runs import TRAINERS, dataset, make_trainer  # noqa: E402
from reward_runs import classifier  # noqa: E402
from tiny import tiny_model  # noqa: E402

from trl.models.unwrap import causal_model  # noqa: E402

NAMES = {"rloo": "RLOO", "online-dpo": "Online DPO", "ppo": "PPO with a value model"}
OWN = {"online-dpo": {"beta": 0.1}, "ppo": {"num_ppo_epochs": 1}}
SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12}


class Peak:
    """The bytes of all tensors of this process, looked at in the last layer as it first runs.

    Args:
        trainer: whose policy generates.
        before: bytes that were there before it was made.
    """

    def __init__(self, trainer, before):
        self.bytes, self._before = 0, before
        layer = causal_model(trainer.model).base_model.layers[-1]
        layer.mlp.register_forward_hook(self._look)

    def _look(self, *args):
        if not self.bytes:
            self.bytes = min(live_bytes() for _ in pauses()) - self._before


def measure(engine, folder, name, gather):
    use(engine)
    options = TRAINERS[name] | OWN.get(name, {})
    if engine == "zero3":  # whose buffers for gradients would hide the weights
        os.environ.update(config_file(engine, folder))
    before = live_bytes()
    if name == "ppo":
        options["value_model"] = classifier(**SHAPE)
    trainer = make_trainer(
        folder,
        model=tiny_model(**SHAPE),
        script=None,
        use_cpu=False,
        data=dataset(["ab", "cd", "ef", "gh"]),
        ds3_gather_for_generation=gather,
        shared_prefix=False,  # whose trial looks first
        max_completion_length=2,
        **options,
    )
    peak = Peak(trainer, before)
    trainer.train()
    return peak.bytes


def main(folder):
    if "RANK" in os.environ:
        report(
            {
                (engine, NAMES[name]): [
                    measure(engine, folder, name, choice) for choice in (True, False)
                ]
                for engine in sys.argv[1:]
                for name in TRAINERS
            }
        )
        finish()
        return
    engines = sys.argv[1:] or SHARDED
    model = tiny_model(**SHAPE)
    weights = sum(p.nbytes for p in model.parameters())
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    packages = ("torch", "transformers", "accelerate", "deepspeed")
    print(f"Weights {weights / 1e6:.1f} MB, a layer {layer / 1e6:.1f} MB, 2 ranks")
    found = ", ".join(f"{name} {version(name)}" for name in packages)
    print(f"{platform.platform()}, Python {platform.python_version()}, {found}\n")
    print("| engine | trainer | `ds3_gather_for_generation=True` | `False` |")
    print("| --- | --- | ---: | ---: |")
    for cell, (once, layerwise) in launch(__file__, "ddp", *engines, timeout=900)[0].items():
        print(f"| {' | '.join(cell)} | {once / 1e6:.1f} MB | {layerwise / 1e6:.1f} MB |")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
