"""Many runs of one trace: a grid of settings, on all cores or on a Ray cluster, and a folder that remembers them."""

from headway.replay.sweep.folder import SweepFolder
from headway.replay.sweep.grid import Grid, Point, points_of
from headway.replay.sweep.workers import Workload, run_points

__all__ = ["Grid", "Point", "SweepFolder", "Workload", "points_of", "run_points"]
