"""The NUMA world: kernel calls, parsers, shared tables and peers.  Standard library and numpy only."""
