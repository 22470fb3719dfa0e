"""Other people's training loops: Hugging Face (``huggingface``) and Lightning (``lightning``).

Neither is imported with the package: each needs what it integrates (``pip install trak-lite[hf]``, ``[lightning]``).
"""
