"""`python -m transformer`, and what torchrun starts."""

from transformer.cli.main import main

if __name__ == "__main__":
    main()
