"""The command line, `hf-hybrid <command>`: thin commands with lazy imports."""
