"""POSIX semantics over metadata and blocks: what a file system means, once for all doors."""
