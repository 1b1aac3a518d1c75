"""What Serve says of a replica."""

from __future__ import annotations

from ray.serve._private.common import ReplicaID, ReplicaState
from ray.serve.context import ReplicaContext, _get_global_client

from raylm.log import get_logger

logger = get_logger(__name__)


def is_stopping(replica: ReplicaID) -> bool:
    """Whether Serve has asked the replica to stop. False where the controller does not say. Waits for its answer."""
    deployment = replica.deployment_id
    try:
        client = _get_global_client(raise_if_no_controller_running=True)
        applications = client.get_serve_details()["applications"]
        replicas = applications[deployment.app_name]["deployments"][deployment.name]["replicas"]
    except Exception as error:  # Ray's and Serve's own, or no such application any more.
        logger.warning("Serve does not say whether this replica is to stop: %s: %s", type(error).__name__, error)
        return False
    states = [each["state"] for each in replicas if each["replica_id"] == replica.unique_id]
    return ReplicaState.STOPPING in states


def may_sleep(context: ReplicaContext) -> bool:
    """Whether Serve may leave the replica's deployment without any."""
    autoscaling = context._deployment_config.autoscaling_config
    return autoscaling is not None and autoscaling.min_replicas == 0
