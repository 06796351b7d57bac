"""Models, parallel layouts and clusters to plan for without any of them at hand."""

from .clusters import CLUSTERS, Cluster, load_cluster
from .layouts import describe_generation, describe_training, domains_for
from .models import MODELS, Model, load_model
from .parallel import Generation, Training

__all__ = [
    "CLUSTERS",
    "MODELS",
    "Cluster",
    "Generation",
    "Model",
    "Training",
    "describe_generation",
    "describe_training",
    "domains_for",
    "load_cluster",
    "load_model",
]
