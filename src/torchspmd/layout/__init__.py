"""What several packages need to know about layouts: shards, meshes, names, parameters."""
