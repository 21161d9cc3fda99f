"""The command line of samo: `samo.cli.main` parses, each command has a module of its name."""
