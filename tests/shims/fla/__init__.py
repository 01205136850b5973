"""Stands in for flash-linear-attention while its own operator tests run against this project's function.

    FLA_DISABLE_BACKEND_DISPATCH=1 PYTHONPATH=tests/shims:. python -m pytest -p no:cacheprovider \
        PATH/TO/flash-linear-attention/tests/ops/test_gdn.py -k "test_chunk or test_fused_recurrent"

FLA_DISABLE_BACKEND_DISPATCH is a switch of those tests: without it they skip grouped value heads. The names
are theirs; what is behind them is ours. Sigmoids, gates and value-first states, which our function leaves to
its caller, are PyTorch here, so tests of FLA's fused gate show nothing about us. Never installed, never
imported by the product.
"""
