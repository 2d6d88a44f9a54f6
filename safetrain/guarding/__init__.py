"""The guards, a family a file. `safetrain.guards` lists them in the order in which they run."""
