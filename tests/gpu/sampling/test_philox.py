"""Random numbers of a key and a counter are NumPy's."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from app.gpu.sampling.philox import uniform


@given(key=st.integers(0, 2**128 - 1), counter=st.integers(0, 2**256 - 1))
@example(key=0, counter=0)
@example(key=2**128 - 1, counter=2**256 - 2)
@example(key=7, counter=2**64 - 1)
@example(key=7, counter=2**256 - 1)
def test_a_number_is_that_of_numpys_generator(key: int, counter: int) -> None:
    assert uniform(key, counter) == np.random.Generator(np.random.Philox(key=key, counter=counter)).random()
