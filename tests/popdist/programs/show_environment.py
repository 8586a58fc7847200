"""Show what one of several instances is, once it is connected."""

import os

import torch
import torch.distributed as dist

import popdist

popdist.init()
dist.barrier()
index, count = popdist.getInstanceIndex(), popdist.getNumInstances()
replicas, threads = popdist.getNumLocalReplicas(), torch.get_num_threads()
print(f"{index} of {count}, replicas {replicas}, {threads} thread, B={os.environ.get('B')}")
