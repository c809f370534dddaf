"""`python -m serving.cli` is `mamba-jax`."""

from serving.cli.main import main

main()
