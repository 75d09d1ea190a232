"""`python -m evalq`."""

import sys

from evalq.cli import main

if __name__ == "__main__":
    sys.exit(main())
