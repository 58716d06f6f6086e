"""Which process this is, from the variables of torchrun and srun."""

import pytest

from leyden.launch.place import Place, find_place

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "123456",
}


def test_a_process_alone_has_no_place() -> None:
    assert find_place({}) is None
    assert find_place({"RANK": "0", "WORLD_SIZE": "1"}) is None
    # A batch script of Slurm that does not call srun is one process, however many tasks were granted
    assert find_place({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None


def test_place_under_torchrun() -> None:
    place = find_place(dict(TORCHRUN))
    assert place == Place(rank=5, world_size=8, local_world_size=4, launcher="torchrun")
    assert place.num_nodes == 2


def test_place_under_srun_is_written_down_for_torch() -> None:
    environment = dict(SRUN)
    assert find_place(environment) == Place(5, 8, 4, "srun")
    assert environment["MASTER_ADDR"] == "gpu07"
    assert environment["MASTER_PORT"] == str(49152 + 123456 % 16384)
    assert {name: environment[name] for name in TORCHRUN} == TORCHRUN
    assert environment["NODE_RANK"] == "1"


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_address_that_was_given_stays(name: str) -> None:
    environment = SRUN | {name: "4242"}
    find_place(environment)
    assert environment[name] == "4242"
