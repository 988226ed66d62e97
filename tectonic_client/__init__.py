"""tectonicfs client: metadata, blocks, chunks, file-system semantics and checkpoints.

Everything that must be true without FUSE or NFS lives in this package; the doors (`fusefs`)
translate and nothing more. See ARCHITECTURE.md for the map.
"""
