"""One module, one page."""
