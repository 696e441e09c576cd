"""Training: packed batches to gradients, gradients to new weights, and what must be kept to go on."""
