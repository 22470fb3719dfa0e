"""Integrations with training libraries: Hugging Face (``huggingface``), TRL (``trl``), Lightning (``lightning``).

Importing the package imports neither, because each needs its library (``pip install trak-lite[hf]``, ``[lightning]``).
"""
