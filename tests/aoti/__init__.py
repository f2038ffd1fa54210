"""Tests of AOTInductor islands, over the programs of ``tests.programs.AOTI``."""
