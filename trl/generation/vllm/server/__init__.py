"""vLLM servers: their client, their workers, and the weights on their way."""
