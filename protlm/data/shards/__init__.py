"""HDF5 shards of tokens: manifest, reader, writer and the index of clusters."""
