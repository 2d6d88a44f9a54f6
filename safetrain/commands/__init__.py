"""What the command line does, a verb a file, and the folder and summary of a run."""
