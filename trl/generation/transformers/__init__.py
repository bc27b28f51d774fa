"""Generation with the policy itself, by transformers or by decoding on shared prompts."""
