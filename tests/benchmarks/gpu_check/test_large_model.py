"""How large a model is made for what there is."""

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.gpu_check.large_model import layers_that_fit, with_layers


@pytest.mark.parametrize(("room", "layers"), [(1000, 33), (70, 33), (69, 32), (8, 2), (6, 1), (5, 0), (3, 0)])
def test_as_many_layers_as_there_is_room_for_and_no_more_than_planned(room: float, layers: int) -> None:
    assert layers_that_fit(33, layer_bytes=2, other_bytes=4, room_bytes=room) == layers


def test_a_shape_can_be_higher_than_it_is() -> None:
    made = AutoModelForCausalLM.from_config(with_layers("random:tiny-llama", 6).config)
    assert len(made.model.layers) == 6
