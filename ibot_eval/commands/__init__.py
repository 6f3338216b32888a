"""Commands that are not protocols: one module each, registered in pyproject."""
