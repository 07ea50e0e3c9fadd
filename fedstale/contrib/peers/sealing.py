"""Sealing: a site's model, encrypted for its neighbours, that a relay can neither read nor change.

Each site has an X25519 key, and the public keys of its neighbours were exchanged out of band. A
model is encrypted under a fresh AES-GCM key. For each neighbour that key is wrapped, together with
the SHA-256 of what is encrypted and a counter, under a key that only the two of them can derive
(X25519 of their own keys, HKDF). So not even another neighbour, who has the model's key, can put
another model into its place. The run and both sites go into the derivation.

A sealed model is one array of bytes: a salt, the number of wraps, for each the number of its site
and the wrap, and then the encrypted records.
"""

import base64
import binascii
import hashlib
import os
import struct
import tomllib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_private_key
from flwr.app import Array, ArrayRecord, RecordDict

from fedstale.contrib.peers.relay import SEALED, bytes_in
from fedstale.errors import ConfigError, ProtocolError
from fedstale.files import check_private
from fedstale.flower import bytes_of_records, records_of_bytes
from fedstale.strategies.types import RejectionError

_SALT, _KEY = 32, 32
_HEAD = struct.Struct(f">{_SALT}sI")
_WRAP = struct.Struct(">I88s")
_WRAPPED = struct.Struct(f">{_KEY}s32sQ")
_ONCE = bytes(12)
"""Nonce of keys that encrypt once."""
_MADE = "openssl genpkey -algorithm x25519 -out site.key"


class Seals:
    """The keys of a site and its neighbours.

    Args:
        key: path of the site's own private key, as PEM.
        peers: path of a TOML file whose table `peers` has the public key of each neighbour, as the
            text between the first and the last line of its PEM, by the number of its site.

    Raises:
        ConfigError: a file cannot be read, holds no such keys, or others may read the private one.
    """

    def __init__(self, key: Path, peers: Path) -> None:
        self._own = _private(key)
        self._peers = _public(peers)
        self.neighbours = sorted(self._peers)
        """Numbers of the sites in the file, which may name the site itself, too."""

    def seal(self, model: ArrayRecord, *, site: int, run_id: int, counter: int) -> ArrayRecord:
        """Return a model that the neighbours can read, and the site itself.

        Args:
            model: of the site.
            site: its number.
            run_id: of the run.
            counter: larger than those before.
        """
        salt, key = os.urandom(_SALT), os.urandom(_KEY)
        body = AESGCM(key).encrypt(_ONCE, bytes_of_records(RecordDict({"": model})), None)
        wrapped = _WRAPPED.pack(key, hashlib.sha256(body).digest(), counter)
        readers = {site, *self._peers}
        parts = [_HEAD.pack(salt, len(readers))]
        for peer in readers:
            between = self._between(peer, sender=site, receiver=peer, run_id=run_id, salt=salt)
            parts.append(_WRAP.pack(peer, AESGCM(between).encrypt(_ONCE, wrapped, None)))
        data = np.frombuffer(b"".join([*parts, body]), np.uint8)
        return ArrayRecord({SEALED: Array(data)})

    def open(
        self, record: ArrayRecord, *, sender: int, site: int, run_id: int
    ) -> tuple[int, ArrayRecord]:
        """Return the counter and the model that a site has sealed.

        Args:
            record: that came in its name.
            sender: its number.
            site: the own number.
            run_id: of the run.

        Raises:
            RejectionError: the sender itself has sealed something that is no model.
            ProtocolError: the sender did not seal it in this way for this site and this run.
        """
        try:
            data = bytes_in(record).tobytes()
        except RejectionError as problem:
            raise ProtocolError(f"it is not sealed: {problem}") from None
        try:
            salt, n = _HEAD.unpack_from(data)
            wraps = dict(_WRAP.iter_unpack(data[_HEAD.size : (end := _HEAD.size + n * _WRAP.size)]))
        except struct.error:
            raise ProtocolError("it is cut off") from None
        if site not in wraps:
            raise ProtocolError(f"it is sealed for sites {sorted(wraps)[:20]}, and this is {site}")
        between = self._between(sender, sender=sender, receiver=site, run_id=run_id, salt=salt)
        try:
            wrapped = AESGCM(between).decrypt(_ONCE, wraps[site], None)
            key, digest, counter = _WRAPPED.unpack(wrapped)
            body = data[end:]
            if hashlib.sha256(body).digest() != digest:
                raise InvalidTag
            text = AESGCM(key).decrypt(_ONCE, body, None)
        except InvalidTag:
            raise ProtocolError(
                "it cannot be opened: it was changed on its way, is of another run, or the public "
                "key of its site is another in site-peers"
            ) from None
        try:
            return counter, records_of_bytes(text).array_records[""]
        except Exception as problem:
            # What a stranger wrote into a message may raise anything.
            what = type(problem).__name__
            raise RejectionError("format", f"it holds no model: {what}") from problem

    def _between(
        self, other: int, *, sender: int, receiver: int, run_id: int, salt: bytes
    ) -> bytes:
        """Return the key that this site and another share for one message."""
        public = self._peers.get(other, self._own.public_key())
        about = f"fedstale sealed model, {sender} to {receiver}, run {run_id}".encode()
        return HKDF(SHA256(), _KEY, salt, about).derive(self._own.exchange(public))


def _private(path: Path) -> X25519PrivateKey:
    check_private("site-key", path)
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as problem:
        raise ConfigError(
            f"site-key = {str(path)!r} cannot be read ({problem}): expected the private key of "
            f"this site, as of {_MADE}"
        ) from None
    if not isinstance(key, X25519PrivateKey):
        raise ConfigError(
            f"site-key = {str(path)!r} holds another kind of key: expected X25519, as of {_MADE}"
        )
    return key


def _public(path: Path) -> Mapping[int, X25519PublicKey]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))["peers"]
        named = {int(site): str(text) for site, text in table.items()}
    except (OSError, ValueError, KeyError, AttributeError) as problem:
        raise ConfigError(
            f"site-peers = {str(path)!r} cannot be read ({problem}): expected a table [peers] with "
            'a line such as 3 = "MCow..." for each neighbour'
        ) from None
    found = {}
    for site, text in named.items():
        try:
            key = load_der_public_key(base64.b64decode(text, validate=True))
        except (ValueError, binascii.Error):
            key = None
        if not isinstance(key, X25519PublicKey):
            raise ConfigError(
                f"site-peers = {str(path)!r}: {site} = {text[:80]!r}: expected the middle line of "
                "openssl pkey -in site.key -pubout of that site"
            )
        found[site] = key
    return found
