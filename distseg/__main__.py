"""``python -m distseg`` is the console command ``distseg``."""

import sys


def main() -> None:
    try:
        from distseg.cli.main import main
    except KeyboardInterrupt:  # during the imports
        print("distseg: interrupted", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
