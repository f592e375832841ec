"""Planning: profile → templates → composition → Plan, and from one plan to the next.

Pure: the same arguments give the same plan on every machine.
"""

from elastic.planning.compose import Composition, compose, compose_short, distribute, replicas
from elastic.planning.make import TooFewNodes, make_plan
from elastic.planning.plan import Bucket, Node, Pipeline, Plan, PlanInvariant, RankPlace, Stage, groups
from elastic.planning.profile import LayerProfile, ModelProfile, format_bytes
from elastic.planning.reconfigure import TOLERANCE, Reconfiguration, Transfer, reconfigure
from elastic.planning.templates import Schedule, Template, TemplateSearch, smallest_size, templates

__all__ = [
    "TOLERANCE",
    "Bucket",
    "Composition",
    "LayerProfile",
    "ModelProfile",
    "Node",
    "Pipeline",
    "Plan",
    "PlanInvariant",
    "RankPlace",
    "Reconfiguration",
    "Schedule",
    "Stage",
    "Template",
    "TemplateSearch",
    "TooFewNodes",
    "Transfer",
    "compose",
    "compose_short",
    "distribute",
    "format_bytes",
    "groups",
    "make_plan",
    "reconfigure",
    "replicas",
    "smallest_size",
    "templates",
]
