"""``python -m distseg`` is the console command ``distseg``."""

from distseg.cli import main

if __name__ == "__main__":
    main()
