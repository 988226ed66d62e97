"""The file-system benchmark: our mount beside the raw device, FUSE itself, and other mounts."""
