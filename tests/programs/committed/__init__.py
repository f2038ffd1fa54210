"""Programs small enough to be committed, with the script that made them: tests that need no export."""
