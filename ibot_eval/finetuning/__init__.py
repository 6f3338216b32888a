"""Training a network end to end on labelled images: what fine-tuning and semi-supervised learning share."""
