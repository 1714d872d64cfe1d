"""Companion: the five stages of PyTorch engineering, and the code that its notebooks run.

Import the module that you need: ``from companion.loop import build, train``.
"""

__version__ = "0.1.0"
