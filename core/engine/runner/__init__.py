"""The runner: the tensors of a step, through the model to sampled tokens."""
