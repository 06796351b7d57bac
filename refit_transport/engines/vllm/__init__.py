"""vLLM as the inference side."""
