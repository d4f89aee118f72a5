"""dspark: lossless acceleration of language models by semi-autoregressive drafting.

Importing the package does nothing and costs nothing; every stage lives in a module of its own. Start reading at
:mod:`dspark.core`, then :mod:`dspark.maths.rejection` and :mod:`dspark.decode`.
"""

__version__ = "0.1.0"
