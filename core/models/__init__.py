"""Models from checkpoints: files that are checked, tensors that are read in pieces, weights that reach their layers."""
