"""The guards inside other people's trainers. Each module here imports its trainer, so import the one you need."""
