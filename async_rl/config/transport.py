"""What a `publish.transport` needs of other sections."""

from collections.abc import Iterator

from async_rl.config.cluster_section import ClusterSection
from async_rl.config.pool_section import PublishSection
from async_rl.config.trainer_section import TrainerSection

SNAPSHOT = (
    "set publish.transport to 'snapshot', and publish.snapshot_dir to a directory in memory, such as /dev/shm/weights"
)


def faults_of_transport(
    placement: str, publish: PublishSection, engine: str, trainer: TrainerSection, cluster: ClusterSection
) -> Iterator[str]:
    """Why weights could not go between these pools that way: `run.placement` and `inference.engine` are given so."""
    transport = publish.transport
    found = f"run.placement is {placement!r}, but publish.transport is {transport!r}, and "
    if placement == "separate" and transport == "ipc":
        yield (
            f"{found}an instance with devices of its own does not see the trainer's: set publish.transport to "
            "'broadcast', or run.placement to 'shared'"
        )
    if placement == "turns" and transport == "ipc":
        yield f"{found}the trainer's weights wait on the host while instances have the devices: {SNAPSHOT}"
    if placement != "separate" and publish.is_broadcast:
        or_ipc = ", or publish.transport to 'ipc'" if placement == "shared" else ""
        yield f"{found}nccl and hccl refuse a group with two ranks on one device: {SNAPSHOT}{or_ipc}"
    found = f"publish.transport is {transport!r}, but "
    if transport == "changes" and engine == "vllm":
        yield (
            f"{found}inference.engine is 'vllm', which makes other tensors of them and needs all each time: set "
            "publish.transport to 'broadcast'"
        )
    if transport == "changes" and publish.canary == "always":
        yield (
            f"{found}publish.canary is 'always', which changes all weights before each publish: set publish.canary to "
            "'first', or publish.transport to 'broadcast'"
        )
    if transport == "stages" and trainer.num_senders == 1:
        yield (
            f"{found}trainer.pipeline_parallel is 1, where one rank sends all weights, unless trainer.expert_parallel "
            "is above trainer.tensor_parallel: set publish.transport to 'broadcast'"
        )
    if transport == "ipc" and cluster.training_nodes > 1:
        yield (
            f"{found}cluster.training_nodes is {cluster.training_nodes}, and memory of a device is mapped on its own "
            "host only: set publish.transport to 'snapshot'"
        )
