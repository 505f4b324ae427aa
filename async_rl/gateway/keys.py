"""The keys of rollouts: unguessable, and recognised after their rollout has ended; for `gateway`."""

import hashlib
import hmac
import secrets

NUM_BYTES = 16


class Keys:
    """Mints keys, and tells a key that it has minted from any other without keeping them."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def mint(self) -> str:
        nonce = secrets.token_hex(NUM_BYTES)
        return f"{nonce}{self._signature(nonce)}"

    def has_minted(self, key: str) -> bool:
        nonce, signature = key[: 2 * NUM_BYTES], key[2 * NUM_BYTES :]
        # As bytes: texts that are not ASCII cannot be compared.
        return hmac.compare_digest(signature.encode(errors="replace"), self._signature(nonce).encode())

    def _signature(self, nonce: str) -> str:
        return hmac.new(self._secret, nonce.encode(errors="replace"), hashlib.sha256).hexdigest()[: 2 * NUM_BYTES]
