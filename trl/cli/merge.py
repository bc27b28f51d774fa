"""`trl merge`: merge an adapter into its base model, which gives an ordinary model."""

import argparse
from pathlib import Path

from .parser import INTERRUPTED, OneLineParser

DTYPES = ("auto", "bfloat16", "float16", "float32")


def main(argv: list[str] | None = None) -> None:
    """Write the merged model, and print its folder."""
    parser = make_parser()
    options = parser.parse_args(argv)
    from .exit import one_line_errors

    with one_line_errors(parser):
        try:
            _merge(options)
        except KeyboardInterrupt:
            parser.exit(INTERRUPTED, f"{parser.prog}: interrupted; the model is incomplete.\n")


def make_parser() -> OneLineParser:
    """Return the parser of `trl merge`."""
    parser = OneLineParser(prog="trl merge", allow_abbrev=False, description=__doc__)
    add = parser.add_argument
    add("adapter", help="output folder or checkpoint of a run, or hub id of an adapter")
    add("--output_dir", required=True, help="folder for the merged model")
    add("--base_model", help="folder or hub id of the base model (default: the one trained on)")
    add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="precision of the merged model (default: auto, that of the stored base model)",
    )
    add("--max_shard_size", default="50GB", help="largest file of weights (default: 50GB)")
    add("--device", default="cpu", help="where weights are merged (default: cpu)")
    add(
        "--full_precision",
        action="store_true",
        help="merge into the stored weights of the base model, even if it was quantized for "
        "training",
    )
    add("--trust_remote_code", action="store_true", help="run code shipped with the model")
    return parser


def _merge(options: argparse.Namespace) -> None:
    import torch

    from ..models import merging, stored_adapter

    torch.device(options.device)  # fails for an unknown device before a large model is loaded
    adapter = stored_adapter.read_adapter(options.adapter, options.base_model)
    folder = Path(options.output_dir)
    merging.check_output(folder, adapter)
    merged = merging.merge_adapter(
        adapter,
        options.dtype,
        options.device,
        options.full_precision,
        options.trust_remote_code,
    )
    for notice in merged.notices:
        print(notice)
    merging.write_merged(merged, adapter, folder, options.max_shard_size)
    million_weights = merged.model.num_parameters() / 1e6
    dtype = str(merged.model.dtype).removeprefix("torch.")
    print(
        f"{folder}: {million_weights:,.1f} million weights in {dtype}, merged into "
        f"{adapter.base_model}"
    )
