"""Code that runs inside a sandbox, in a Python without site packages and without this package.

`boot.py` on the outside sends its modules' code over a socket; they import the standard library and each other, and
import little, since every program waits for it: `typing` alone takes as long as Python's own start. Nothing here is
trusted once a program runs beside it.
"""
