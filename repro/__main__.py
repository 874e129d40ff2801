"""`python -m repro` is the same as `repro`."""

from repro.cli import main

raise SystemExit(main())
