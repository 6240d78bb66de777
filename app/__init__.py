"""The web face, the command line, and the only place where the parts are joined."""
