"""Elastic, fault-tolerant training for PyTorch: the weights at the end do not depend on which machines came and went.

import elastic

def job(params):
    return elastic.Job(layers=elastic.layers_of(model), loss=..., dataset=..., optimizer=...)

result = elastic.run("my_job.yaml", set=["cluster.nodes=2"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.errors import ElasticError as ElasticError
    from elastic.job import Evaluation as Evaluation
    from elastic.job import Job as Job
    from elastic.job import Layer as Layer
    from elastic.job import Metrics as Metrics
    from elastic.job import layers_of as layers_of
    from elastic.runner import run as run

# Loaded on first use: agents, the controller and most commands never import torch.
_HOMES = {
    "ElasticError": "elastic.errors",
    "Evaluation": "elastic.job",
    "Job": "elastic.job",
    "Layer": "elastic.job",
    "Metrics": "elastic.job",
    "layers_of": "elastic.job",
    "run": "elastic.runner",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'elastic' has no attribute {name!r}")
