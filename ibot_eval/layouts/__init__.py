"""Published checkpoint layouts: opening files, finding the network in them, and building it with timm."""
