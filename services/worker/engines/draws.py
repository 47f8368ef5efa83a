"""Random numbers that depend only on (seed, position): any engine continues a request alike."""

_MASK = (1 << 64) - 1
# 2^64 / golden ratio, the increment of SplitMix64 (Steele, Lea, Flood 2014)
_GOLDEN = 0x9E3779B97F4A7C15


def _scramble(z: int) -> int:
    """The finaliser of SplitMix64 (Stafford's variant 13)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def bits(seed: int, position: int) -> int:
    """64 bits that look random. Equal arguments give equal bits. Seeds are taken modulo 2^64."""
    return _scramble((_scramble(seed * _GOLDEN & _MASK) + (position + 1) * _GOLDEN) & _MASK)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), on a grid of 2^-53."""
    return float(bits(seed, position) >> 11) * 2.0**-53
