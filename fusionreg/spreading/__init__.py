"""``run``, ``bench`` and ``tune`` on many processes, the GPUs of one host, or the workers of a Dask cluster."""

from .work import bench, prepare, run, tune
from .workers import Lost, Workers, workers

__all__ = ["Lost", "Workers", "bench", "prepare", "run", "tune", "workers"]
