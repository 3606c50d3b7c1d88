"""From gradients to new masters: loss scale, norm and clipping, optimizers, schedules."""
