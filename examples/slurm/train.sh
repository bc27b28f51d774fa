#!/bin/bash
# Train on several machines: sbatch examples/slurm/train.sh [options of `trl rloo`]
#SBATCH --job-name=rloo
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail

export CONFIG=${CONFIG:-examples/cli_configs/rloo_70b_64_gpus.yaml}
export GPUS=${GPUS:-8} # of each machine
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # reads all: `head` may close early
export HEAD
export PORT=${PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export PYTHONUNBUFFERED=1

# One task on each machine starts the processes of its GPUs. A machine that fails ends the job.
srun --kill-on-bad-exit=1 bash -c '
    exec trl rloo --config "$CONFIG" \
        --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * GPUS))" \
        --machine_rank "$SLURM_NODEID" --main_process_ip "$HEAD" --main_process_port "$PORT" "$@"
' trl "$@"
