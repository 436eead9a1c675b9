"""`python -m kullback`: the command line, where its script is not on the path."""

from kullback.cli import main

if __name__ == "__main__":
    main()
