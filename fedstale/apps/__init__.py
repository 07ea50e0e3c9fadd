"""The built-in app, a folder that `flwr run` accepts as it is, and the template of new ones.

They are folders and not packages: Flower imports an app from its own folder, and nothing in
fedstale imports them. An app has its data, its model and its run config; what those of this project
have in common is here: `server` and `client`, `classification` for labels that are dealt unevenly,
and `characters` for the roles of a play and their next characters, which two of the examples learn.
The template imports none of these.
"""
