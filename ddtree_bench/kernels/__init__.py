"""Operations of a decoding round on tensors: one operation, one folder.

A folder holds
    __init__.py       the contract: shapes, dtypes, checks, and the choice of the implementation
    reference.py      the answer on any device with torch alone, accumulated in float32 or wider
    triton_kernel.py  the answer on a GPU, where one has been written
    cases.py          named shapes and seeded inputs, shared by the test and the bench
and the public function, the folder and tests/kernels/test_<op>.py share one name.

A new operation goes into a folder of its own; a new implementation goes beside the reference, is chosen in
`__init__.py`, and imports no other implementation. What two references share lies directly in this package.
Checks look at shapes, dtypes and devices only, so that calling an operation never waits for the device; a
reference may also check values.
"""
