"""Pictures of the command line for the documents."""
