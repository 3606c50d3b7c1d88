"""Stand-ins for packages whose kernels only a GPU runs: their shapes, saved tensors and FLOPs, named in the report.

`with stand_ins() as notes:` around what loads or traces a model.
"""

from dsplan.planner.capturing.standing.importing import stand_ins

__all__ = ["stand_ins"]
