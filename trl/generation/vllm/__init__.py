"""Generation by a vLLM engine, in the training process or on servers."""
