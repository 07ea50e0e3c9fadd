"""Puts this folder's helpers, such as `small_app`, within reach of the folders below."""
