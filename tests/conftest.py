"""What all tests share: compiled files, and which tests run beside one another."""

import os
import sys

# Tests start many processes: all of them load what the first one compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
