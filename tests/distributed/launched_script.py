"""A script of a user, for `accelerate launch` and `torchrun`; prints its group of processes."""

from accelerate.utils import gather_object

from trl import SFTConfig

args = SFTConfig("output", report_to="none")
ranks = gather_object([args.process_index])
rank = f"rank {args.process_index} of {args.world_size}"
print(f"{rank} on {args.device} among {sorted(ranks)}", flush=True)
