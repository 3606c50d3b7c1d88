"""A model cut over ranks: ZeRO stages as flags of FSDP2."""
