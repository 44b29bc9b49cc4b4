"""``python -m ringmem`` is the ``ringmem`` command."""

from ringmem.cli import main

if __name__ == "__main__":
    main()
