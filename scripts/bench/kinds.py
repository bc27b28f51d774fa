"""Peak of an update by the number of completions, for kinds of layers: docs/benchmarks/kinds.md.

Each cell runs in its own process, on the meter of `memory.py`; cells that kinds.json has are not
measured again. The peer is measured on the path of its head that it takes on a GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import environments
from runs import RESULTS, Store, Work, execute, peak_of
from tables import markdown

KINDS = {
    "gemma3": "Gemma 3: windows of 512 tokens",
    "gpt-oss": "gpt-oss: windows of 128 tokens, sinks, experts",
    "deepseek-v3": "DeepSeek V3: latent attention, experts",
    "qwen3-next": "Qwen3-Next: gated delta rule beside attention",
}
TRAINERS = {"this": "this project", "trl-1.16.0": "trl 1.16.0, its GPU path"}
COUNTS = (2, 8, 64)
OPTIONS = '{"router_aux_loss_coef": 0.0}'  # the loss of experts counts every row's own prompt
PAGE = """# Memory of an update by kind of layers

Made by `make bench-kinds`, which measures the cells that `kinds.json` lacks. One prompt of 3,100
tokens, k completions of 53, the whole group in one micro-batch, two steps of RLOO with `beta=0.05`
and otherwise default options, but without the loss that balances experts. Random models in float32
under bfloat16 autocast: hidden size 64, four layers, 151,936 entries in the vocabulary. Peaks in MB
above what is held when training begins, measured as in [the other benchmarks](memory.md). A dash
means not measured: 64 completions of gpt-oss and of DeepSeek V3 would need about eight times as
much as 8 with the peer, more than the 24 GB of the machine.

With gpt-oss and DeepSeek V3, the peak of this project is that of the layout test before the first
round, in which transformers computes two rows in its own way, with all products of queries and keys
at once. The training that follows holds 325 MB and 273 MB.
"""


def work_of(trainer: str, kind: str, count: int) -> Work:
    """Return the work of a cell."""
    sizes = {"prompt": 3100, "completion": 53, "completions": count, "steps": 2}
    is_peer = trainer != "this"
    return Work(trainer, shape=kind, options=OPTIONS, gpu_path=is_peer, **sizes)


def page(store: Store) -> str:
    """Make the page with the table of measurements."""
    rows: list[list[Any]] = []
    for kind, title in KINDS.items():
        for trainer, name in TRAINERS.items():
            count_rows = [store.find("kinds", work_of(trainer, kind, count)) for count in COUNTS]
            peaks = [peak_of(row) for row in count_rows]
            cells = ["-" if peak is None else f"{peak / 1e6:,.1f}" for peak in peaks]
            ends = peaks[0], peaks[-1]
            grows = f"{ends[1] / ends[0]:.2f}" if ends[0] and ends[1] else "-"
            rows.append([title, name, *cells, grows])
    head = ["layers", "trainer", *(f"k={count}" for count in COUNTS), "last / first"]
    return PAGE + "\n" + markdown(head, rows) + "\n"


def main() -> None:
    """Measure what the results file lacks, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"some of {', '.join(KINDS)}; none: all")
    parser.add_argument("--limit-gb", type=float, default=0.0, help="most memory of a cell")
    parser.add_argument("--trainers", nargs="+", default=[*TRAINERS], choices=TRAINERS)
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS, choices=COUNTS)
    options = parser.parse_args()
    store = Store(RESULTS / "kinds.json")
    for trainer in options.trainers:
        if trainer in environments.PEERS:
            environments.make(trainer)
        for kind in options.kinds or KINDS:
            for work in (work_of(trainer, kind, count) for count in options.counts):
                if peak_of(store.find("kinds", work)) is None:
                    run = execute(work, options.limit_gb)
                    store.add("kinds", work, run)
                    print(
                        trainer,
                        kind,
                        work.completions,
                        run.get("peak", run.get("error")),
                        flush=True,
                    )
                    (RESULTS / "kinds.md").write_text(page(store), encoding="utf-8")


if __name__ == "__main__":
    main()
