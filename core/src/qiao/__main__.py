"""``python -m qiao`` is the ``qiao`` command."""

from qiao.cli.main import main

if __name__ == "__main__":
    main()
