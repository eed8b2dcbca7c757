"""The entry point of ``powersgd`` and ``python -m powersgd``."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

EXTRA = ("typer", "rich", "matplotlib", "sklearn")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program's name; None means those of this process.

    Returns:
        The exit code: 0 for success, 1 for a failed run, 2 for wrong arguments or a missing
        package, 130 after Ctrl-C.
    """
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        print(
            f"The command line needs {' and '.join(missing)}: "
            "install with pip install 'torch-powersgd[cli]'.",
            file=sys.stderr,
        )
        return 2
    try:
        # Only now, because it imports what may be missing.
        from powersgd.cli import run

        return run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
