"""The Hopper part of the device library, executed in the simulator under all checks."""

from hopper_products import (  # noqa: F401
    test_a_from_registers,
    test_ldmatrix,
    test_operands_without_swizzle,
    test_products,
    test_products_keep_nan_and_infinity,
    test_stmatrix,
    test_warpgroups,
)
from hopper_tiles import (  # noqa: F401
    test_bulk_copies,
    test_memory_of_other_blocks,
    test_multicast,
    test_stores_leave_out_what_is_outside,
    test_swizzled_elements,
    test_swizzles,
    test_tiles_of_every_rank,
    test_what_is_outside_may_be_nan,
)
