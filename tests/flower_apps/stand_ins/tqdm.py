"""Progress bars that are not drawn."""


def tqdm(things=(), *_, **__):
    return things
