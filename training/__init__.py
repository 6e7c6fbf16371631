"""Training beyond what transformers' Trainer does: a ring of workers, optimizers, schedules of the families."""
