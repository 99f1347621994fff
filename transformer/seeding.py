"""Seeds that follow from what they are for: randomness is derived, not stored.

A resumed run needs no generator state: the numbers for (epoch, step, micro-batch) are the same whenever they are drawn.
"""

import hashlib


def seed_for(*parts: int) -> int:
    """Mix integers, such as (seed, epoch, step, micro_batch), into one 32-bit seed.

    A hash, not a sum: (1, 2) and (2, 1) must differ. torch's CPU generator uses only the low 32 bits of a seed, so the
    64-bit digest is folded: both halves count.
    """
    text = ",".join(str(int(part)) for part in parts).encode("ascii")
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return (digest >> 32) ^ (digest & 0xFFFFFFFF)
