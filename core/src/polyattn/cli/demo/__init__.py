"""placeholder while the rest is tried"""


def demo() -> None:
    """x"""
