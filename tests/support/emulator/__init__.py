"""Runs compiled Triton kernels without a GPU: their PTX for sm_90, a warp at a time, on CPU
tensors.

    decode.py    PTX -> a list of instructions          driver.py       Triton's driver, options, reports
    machine.h    what these share: warps, blocks        emulator.cpp    branches, barriers, launches
    memory.h     loads, stores, copies, races           products.h      tensor cores, matrices
    numbers.h    16-bit floats and others               operations.h    the table of all operations

`options` says how: asynchronous work (cp.async, wgmma) is done when it is waited for or when it is
issued, in any order of warps. Where a result depends on one of these, the kernel is wrong. With
`check`, reports name an access that no barrier orders, a product without the proxy fence that it
needs, a read of shared memory that nobody wrote, a use of a product's registers before its end.
Always reported are accesses outside of every tensor, misaligned ones, and barriers, shuffles and
products in divergent code.

Not modelled: ptxas (what it moves, contracts, allots), time, the order of lanes inside a warp,
single bytes (races are seen in pairs); accumulators set behind wgmma.fence pass where the product
does not read them. What our kernels do not use raises Unsupported: TMA, mbarrier, atomics, calls.
"""
