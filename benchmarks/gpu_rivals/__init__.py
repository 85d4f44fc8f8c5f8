"""vLLM for GPU machines without a network: packed here, unpacked and proved there."""
