"""trak_lite: which training examples made the model say this?"""

__version__ = "0.1.0"
