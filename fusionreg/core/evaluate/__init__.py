"""What a graph means: evaluation by the operator vocabulary, sub-graphs included. Floor 1."""
