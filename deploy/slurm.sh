#!/usr/bin/env bash
# One training run on the nodes of a Slurm job:  sbatch deploy/slurm.sh cartpole --actors 8 --run-dir /shared/runs/one
# What follows the script's name goes to `qfleet train`. An environment that has qfleet[ray] is active on all nodes.
#SBATCH --job-name=qfleet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
set -euo pipefail

# Whoever has the token may run anything on these nodes: it is made for this job, and no command line shows it.
RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r ip _ < <(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address)
address=$ip:$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a node do not meet

# Starts Ray on every node, waits for all of them, trains on the first, and stops Ray.
srun ray symmetric-run --address "$address" --min-nodes "${#nodes[@]}" -- \
  qfleet train "$@" --placement ray --address "$address"
