"""The chunk-store port and its implementations (flash directory, memory) and wrappers."""
