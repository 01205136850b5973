"""The NKI kernels' inverse on the simulator, beside float64 and beside substitution."""

import numpy as np
import pytest
import torch

from delta_trn.nki_kernels import tiles, triangular
from delta_trn.nki_kernels.chunk_tiles import Chunk
from delta_trn.nki_kernels.language import nisa, nki, nl
from tests.support.nki_judge import run


@nki.jit
def inverse_of(Gt, C, lanes):
    """Returns the inverse of I - G and its transpose, by the kernels' own stages."""
    table = tiles.build_constants(C)
    tile = tiles.sbuf((C, lanes, C))
    nisa.dma_copy(dst=tile, src=Gt)
    space = triangular.allocate_workspace(C, lanes)
    table = tiles.take_corners(table, C)
    blocks = triangular.build_block_constants(C)
    chunk = Chunk(
        table=table, minus_L_t=tile, block_columns=triangular.list_block_columns(tile, blocks)
    )
    for stage in triangular.INVERSE:
        triangular.invert_chunks(stage, 1, 1, [chunk], [space], True, blocks)
    out = nl.ndarray((2, C, lanes, C), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[0], src=chunk.T)
    nisa.dma_copy(dst=out[1], src=chunk.T_t)
    return out


def correlated(C, rho, beta, seed):
    """Returns -beta strict(K K^T) for unit keys of pairwise correlation rho, float32."""
    rng = np.random.default_rng(seed)
    k = np.sqrt(rho) * rng.standard_normal((1, 64)) + np.sqrt(1 - rho) * rng.standard_normal(
        (C, 64)
    )
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    return np.tril(-beta * k @ k.T, -1).astype(np.float32)


@pytest.mark.parametrize("C", [2, 4, 32, 128])
@pytest.mark.parametrize("rho", [0.0, 0.9, 1.0])
def test_the_inverse_keeps_its_digits_for_correlated_keys(C, rho):
    G = np.stack([correlated(C, rho, 1.0, seed) for seed in range(3)])
    above = np.triu(np.ones((C, C), np.float32)) * 7  # must be ignored
    T, Tt = run(inverse_of, torch.from_numpy((G + above).transpose(2, 0, 1)), C, 3).numpy()
    exact = np.linalg.inv(np.eye(C) - G.astype(np.float64)).transpose(1, 0, 2)
    # each of the log2(C) levels sums up to C terms of order 1, twice, and rounds
    allowed = 2 * np.log2(2 * C) * np.sqrt(C) * np.finfo(np.float32).eps / 2
    assert np.linalg.norm(T - exact) / np.linalg.norm(exact) <= allowed
    np.testing.assert_allclose(Tt, T.transpose(2, 1, 0), atol=20 * allowed)


def substituted(G):
    """Returns the inverse of I - G by substitution of all rows,
    each product and sum rounded to float32.
    """
    T = np.eye(len(G), dtype=np.float32)
    for a in range(len(G) - 1):
        T[a + 1 :] += G[a + 1 :, a : a + 1] * T[a : a + 1]
    return T


def errors_of_the_inverse(beta):
    """Returns T's largest error where all keys are equal, and that of substitution,
    for each of 6 chunks.
    """
    G = np.stack([correlated(128, 1.0, beta, seed) for seed in range(6)])
    exact = np.linalg.inv(np.eye(128) - G.astype(np.float64))
    parts = [
        run(inverse_of, torch.from_numpy(x.transpose(2, 0, 1).copy()), 128, 3)
        for x in (G[:3], G[3:])
    ]
    T = np.concatenate([part[0].numpy().transpose(1, 0, 2) for part in parts])
    control = np.stack([substituted(x) for x in G])
    return np.abs(T - exact).max((1, 2)), np.abs(control - exact).max((1, 2))


# twice the error of substitution, since a product adds the same terms in another order
@pytest.mark.parametrize("beta", [1.0, 1.4, 1.6, 1.8, 1.9, 2.0])
def test_the_inverse_of_equal_keys_is_as_exact_as_substitution(beta):
    errors, control = errors_of_the_inverse(beta)
    assert errors.mean() <= 2 * control.mean()
