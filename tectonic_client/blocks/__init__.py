"""The block layer's data path: buffers, placement, writing and reading of chunks."""
