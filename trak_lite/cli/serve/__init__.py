"""Pages that answer questions about one store in a browser: ``trak-lite serve STORE``.

Needs ``pip install trak-lite[serve]``. The pages are templates of :mod:`trak_lite.report`. The server binds to
127.0.0.1 only. Without a recipe it executes no code of the user and shows what is stored.
"""
