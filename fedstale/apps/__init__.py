"""The built-in apps, each a folder that `flwr run` accepts as it is, and the template of new ones.

They are folders and not packages: Flower imports an app from its own folder, and nothing in
fedstale imports them. An app has its data, its model and its run config; what their two sides have
in common is in `server` and `client`, in `classification` for labels that are dealt unevenly, and
in `play` and `characters` for the roles of a play and their next characters. The template imports
none of these.
"""
