"""DeepSpeed's Lamb."""

from dsplan.runtime.optimizing.lamb import Lamb


class FusedLamb(Lamb):
    """Lamb."""
