"""Random numbers of keys and counters are NumPy's."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from app.gpu.sampling.philox import uniforms

drawn = st.tuples(st.integers(0, 2**128 - 1), st.integers(0, 2**64 - 2))
LARGEST = (2**128 - 1, 2**64 - 2)


@given(st.lists(drawn, min_size=1, max_size=20))
@example([(0, 0)])
@example([LARGEST, LARGEST, (0, 0), LARGEST])
@example([(seed, 1000 + seed) for seed in range(300)])
def test_each_number_is_that_of_numpys_generator(pairs: list[tuple[int, int]]) -> None:
    wanted = [np.random.Generator(np.random.Philox(key=key, counter=counter)).random() for key, counter in pairs]
    assert uniforms([key for key, _ in pairs], [counter for _, counter in pairs]).tolist() == wanted
