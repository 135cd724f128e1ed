"""A TrainJob of Kubeflow Trainer v2 as text, with the script and a place for checkpoints in the same file.

Checked against the models that Kubeflow generates from its custom resources (PyPI: kubeflow-trainer-api), never run on
a cluster. `runtimePatches` are there since Trainer 2.2; what they may patch: kubeflow.org, "Runtime Patches".
"""

from __future__ import annotations

import re

from labkit.cluster.handover import CHECKPOINTS, HandOver
from labkit.cluster.yaml import block, items, scalar
from labkit.errors import LaunchError

__all__ = ["trainjob"]

SCRIPTS = "/labkit"
MOST_BYTES = 1_000_000  # of a ConfigMap: 1 MiB, and what kubectl writes beside it


def trainjob(job: HandOver) -> str:
    """The file for `kubectl apply --server-side -f`. Raises LaunchError for a script that no ConfigMap holds."""
    if len(job.text.encode()) > MOST_BYTES:
        raise LaunchError(
            f"{job.script.name}.py has {len(job.text.encode()):,} bytes, a ConfigMap holds {MOST_BYTES:,}; put the "
            "script into the image"
        )
    # Kubernetes replaces $(NAME) in a command, and reads $$ as $
    command = items([re.sub(r"\$(?=[$(])", "$$", word) for word in (f"{SCRIPTS}/{job.name}.py", *job.args)], 6)
    return f"""\
# {job.shape}, for Kubeflow Trainer 2.2 or newer. Written by labkit, whose tests check such files against Kubeflow's own
# models; none was run on a cluster.
#   kubectl apply --server-side -f FILE     without it kubectl keeps a copy, for which 256 KiB are the most
#   kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={job.name}
#   kubectl delete trainjob {job.name}         keeps the checkpoints; apply again to go on. delete -f deletes them, too
# Begun again, {job.goes_on}.
apiVersion: v1
kind: ConfigMap
metadata:
  name: {job.name}-script
data:
  {job.name}.py: {block(job.text, 4)}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {job.name}-checkpoints
spec:
  # all nodes write their shards into one folder: NFS, CephFS, EFS, Filestore, …
  accessModes:
    - ReadWriteMany
  resources:
    requests:
      storage: 10Gi
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.name}
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    numNodes: {job.nodes}
    numProcPerNode: {job.nproc_per_node}
    # the runtime tells torchrun by PET_* how many nodes there are, which one this is, and where the first is
    command:
      - torchrun
{command}
    env:
      - name: PYTHONSAFEPATH  # a script that is called random.py must not hide Python's own
        value: "1"
      - name: PYTHONUNBUFFERED
        value: "1"
      - name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT  # seconds to save in, after SIGTERM; 30 unless said
        value: "110"
    resourcesPerNode:
      limits:
        nvidia.com/gpu: {scalar(str(job.nproc_per_node))}
  runtimePatches:
    - manager: labkit
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        terminationGracePeriodSeconds: 120  # longer than torchrun waits
                        containers:
                          - name: node
                            volumeMounts:
                              - name: script
                                mountPath: {SCRIPTS}
                              - name: checkpoints
                                mountPath: {CHECKPOINTS}
                        volumes:
                          - name: script
                            configMap:
                              name: {job.name}-script
                          - name: checkpoints
                            persistentVolumeClaim:
                              claimName: {job.name}-checkpoints
"""
