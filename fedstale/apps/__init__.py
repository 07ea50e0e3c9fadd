"""The built-in apps, each a folder that `flwr run` accepts as it is, and the template of new ones.

They are folders and not packages: Flower imports an app from its own folder, and nothing in
fedstale imports them. Only their servers know of fedstale, and only of its strategies, so that they
can be copied and changed; `strategy` holds the choice that the built-in ones offer.
"""
