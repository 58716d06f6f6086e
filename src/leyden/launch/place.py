"""Which of several processes this one is, where torchrun or srun started them."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A process among those of a run.

    Attributes:
        rank, world_size: its number, and how many there are on all machines.
        local_world_size: how many there are on this machine.
        launcher: the command that started them.
    """

    rank: int
    world_size: int
    local_world_size: int
    launcher: str

    @property
    def num_nodes(self) -> int:
        """How many machines take part."""
        return self.world_size // self.local_world_size


def find_place(environment: MutableMapping[str, str] = os.environ) -> Place | None:
    """This process's place, from what torchrun, srun or Leyden itself set; None for a process alone.

    What srun says is written down in the variables that torch reads.
    """
    if "RANK" not in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        environment.update(translate_slurm(environment))
    world_size = int(environment.get("WORLD_SIZE", "1"))
    if world_size < 2 or "RANK" not in environment:
        return None
    launcher = "srun" if "SLURM_STEP_NUM_TASKS" in environment else "torchrun"
    local_world_size = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    return Place(int(environment["RANK"]), world_size, local_world_size, launcher)


def translate_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Torch's variables from those of a job step of Slurm.

    Source: https://slurm.schedmd.com/srun.html, output environment variables.
    """
    from lightning.fabric.plugins.environments import SLURMEnvironment

    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "127.0.0.1"))
    size, num_nodes = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    # Private ports, a different one for each job
    port = 49152 + int(environment.get("SLURM_JOB_ID", "0")) % 16384
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(size // num_nodes),
        "NODE_RANK": environment.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR", SLURMEnvironment.resolve_root_node_address(nodes)),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }
