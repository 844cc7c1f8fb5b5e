"""`python -m fewshift.cli`."""

from fewshift.cli import main

if __name__ == "__main__":
    main()
