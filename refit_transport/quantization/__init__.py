"""FP8 on the trainers' side: block formats, and a weight source that offers quantised tensors with their scales."""
