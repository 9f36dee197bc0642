"""Triton kernels, installed as ``pylosses.kernels``."""

if __name__ == "kernels":
    raise ImportError("this folder is pylosses.kernels; import pylosses instead of putting its source tree on sys.path")
