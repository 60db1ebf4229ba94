"""Passes: small values from program to program, or from program to plan. One pass a file; knows no executables."""
