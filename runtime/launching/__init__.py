"""dsplan launch: starts ranks, tells what became of them, and how each rank begins."""
