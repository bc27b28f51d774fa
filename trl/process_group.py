"""Find out whether this process was launched as one of several, and how they are connected."""

import os
import sys

import torch

# Environment variables in which launchers give the number of processes: torchrun, three MPI
# implementations, and srun.
LAUNCHED_PROCESSES = (
    "WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
_SHARDING_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def has_accelerator() -> bool:
    """Return whether processes can train together on accelerators of this machine, such as GPUs.

    If `ACCELERATE_TORCH_DEVICE` is set, accelerate uses that device without looking for others.
    """
    if "ACCELERATE_TORCH_DEVICE" in os.environ:
        return True
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"  # only one process can use MPS


def launched_on_cpu() -> bool:
    """Return whether this process should train on the CPU.

    True if the launcher asks for it, or if several processes were launched on a machine without
    accelerators: accelerate connects processes on CPUs only if its `cpu` option is set.
    """
    if _is_on("ACCELERATE_USE_CPU"):
        return True
    _, processes = launched_processes()
    if processes == 1 or "MASTER_ADDR" not in os.environ or sharding_engine() is not None:
        return False
    return not has_accelerator()


def launched_processes() -> tuple[str, int]:
    """Return the number of processes launched together, after the variable that gives it.

    The variable is "" and the number 1 if no variable is set.
    """
    values = {name: os.environ.get(name, "") for name in LAUNCHED_PROCESSES}
    if sys.stdin is not None and sys.stdin.isatty():
        # A shell started by `srun --pty` inherits the number of tasks, but its programs run alone.
        del values["SLURM_STEP_NUM_TASKS"]
    process_counts = {name: int(value) for name, value in values.items() if value.isdecimal()}
    name = max(process_counts, key=lambda name: process_counts[name], default="")
    return name, max(1, process_counts.get(name, 1))


def sharding_engine() -> str | None:
    """Return the engine that shards the model across processes, if the launcher chose one."""
    return next((engine for name, engine in _SHARDING_ENGINES.items() if _is_on(name)), None)


def check_not_alone(processes: int) -> None:
    """Raise an error if this process was launched as one of several but is not connected to them.

    Args:
        processes: number of connected processes, including this one.

    Raises:
        ValueError: each process would train alone and overwrite the files of the others.
    """
    name, launched = launched_processes()
    if processes > 1 or launched == 1:
        return
    problem = (
        f"{name}={launched}: this process was launched as one of {launched} but is not connected "
        "to the others, so each would train alone in the same output folder."
    )
    engine = sharding_engine()
    if engine is not None and not has_accelerator():
        raise ValueError(
            f"{problem} {engine} needs a GPU, and this machine has none. On CPUs, launch with the "
            "configuration multi_cpu (`trl COMMAND --accelerate_config multi_cpu`)."
        )
    raise ValueError(
        f"{problem} Launch with `accelerate launch`, `torchrun` or `trl COMMAND --num_processes "
        f"{launched}`. If each is meant to train alone, remove {name} from the environment."
    )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")
