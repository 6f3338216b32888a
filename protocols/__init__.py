"""The protocols that ship with ibot-eval: one module each, registered in pyproject."""
