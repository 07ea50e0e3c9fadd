"""A conftest.py puts its folder on sys.path: the folders below import `virtual_grid` from here."""
