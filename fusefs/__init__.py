"""The FUSE door: translates between the kernel and `tectonic_client.filesystem`."""
