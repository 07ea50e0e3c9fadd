"""Progress bars that are not drawn."""


def tqdm(things=(), **_):
    return things
