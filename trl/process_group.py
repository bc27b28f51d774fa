"""Whether this process was launched as one of several, and what connects them."""

import os
import sys

import torch

# Variables in which launchers write how many processes they started together: torchrun, three kinds
# of MPI, and srun.
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
    """Whether processes can be connected over an accelerator of this machine, such as GPUs.

    `ACCELERATE_TORCH_DEVICE` names a device that accelerate uses whatever it finds.
    """
    if "ACCELERATE_TORCH_DEVICE" in os.environ:
        return True
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"  # which one process uses alone


def launched_on_cpu() -> bool:
    """Whether the launcher of this process, or the lack of accelerators, puts it on the CPU.

    Accelerate connects processes over CPUs only if it is told to use the CPU.
    """
    if _is_on("ACCELERATE_USE_CPU"):
        return True
    _, processes = launched_processes()
    if processes == 1 or "MASTER_ADDR" not in os.environ or sharding_engine() is not None:
        return False
    return not has_accelerator()


def launched_processes() -> tuple[str, int]:
    """How many processes were launched together with this one, and the variable that says so."""
    counts = {name: os.environ.get(name, "") for name in LAUNCHED_PROCESSES}
    if sys.stdin is not None and sys.stdin.isatty():
        # An interactive shell of `srun --pty` inherits the size of the step but runs alone.
        del counts["SLURM_STEP_NUM_TASKS"]
    processes = {name: int(count) for name, count in counts.items() if count.isdecimal()}
    name = max(processes, key=lambda name: processes[name], default="")
    return name, max(1, processes.get(name, 1))


def sharding_engine() -> str | None:
    """The engine that divides the model among processes, if the launcher chose one."""
    return next((engine for name, engine in _SHARDING_ENGINES.items() if _is_on(name)), None)


def check_not_alone(processes: int) -> None:
    """Refuse to train alone in a process that was launched as one of several.

    Args:
        processes: how many are connected, this one included.

    Raises:
        ValueError: each of them would train alone and write over the files of the others.
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
