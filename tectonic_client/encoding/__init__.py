"""Pure encodings of data: checksums, compression, the format of a chunk."""
