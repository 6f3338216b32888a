"""Images and labels: where they come from, how they are decoded, transformed and fed to a backbone."""
