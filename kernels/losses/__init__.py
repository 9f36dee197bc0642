"""One Triton formula per loss, named like its file in ``pylosses/losses``."""
